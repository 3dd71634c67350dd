"""The common part of forecasts of whole passes: a trial decides whether passes are faster with prefetches."""

from __future__ import annotations

from moeflow.core.trial import Trial
from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.expert_cache import ExpertCache


class GovernedForecast:
    """Reports passes that are asked about to a trial."""

    def __init__(self, cache: ExpertCache, trial: Trial) -> None:
        self._cache, self.trial = cache, trial
        self._before: CacheStats | None = None  # of a pass that is asked about

    @property
    def is_on(self) -> bool:
        """Whether predictions are made and followed now."""
        return self.trial.is_on

    def close(self) -> None:
        """End what runs beside the passes: nothing."""

    def drop_pass(self) -> None:
        """Forget a pass that failed: its time tells nothing."""
        self._before = None

    def end_pass(self, num_tokens: int, seconds: float) -> None:
        """Report to the trial how long a pass took. A pass that lacked nothing tells nothing about reading."""
        before, self._before = self._before, None
        if before is None:
            return
        during = self._cache.stats() - before
        if during.misses or during.late or during.prefetched_bytes:
            self.trial.end_pass(num_tokens, seconds, during.stall_s)
