"""What forecasts of whole passes have in common: a governor that asks after every pass whether reading ahead pays."""

from __future__ import annotations

from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.predict.governor import Governor


class GovernedForecast:
    """Reports passes that are asked about to a governor."""

    def __init__(self, cache: ExpertCache, governor: Governor) -> None:
        self.note = ""  # the governor's last message
        self._cache, self._governor = cache, governor
        self._before: CacheStats | None = None  # of a pass that is asked about

    @property
    def is_on(self) -> bool:
        """Whether predictions are made and followed now."""
        return self._governor.is_on

    def close(self) -> None:
        """End what runs beside the passes: nothing."""

    def drop_pass(self) -> None:
        """Forget a pass that failed: its time tells nothing."""
        self._before = None

    def end_pass(self, num_tokens: int, seconds: float) -> str | None:
        """Report to the governor how long a pass took; return its message if its verdict is new.

        A pass that lacked nothing tells nothing about reading.
        """
        before, self._before = self._before, None
        if before is None:
            return None
        during = self._cache.stats() - before
        if not (during.misses or during.late or during.prefetched_bytes):
            return None
        message = self._governor.end_pass(num_tokens, seconds)
        self.note = message or self.note
        return message
