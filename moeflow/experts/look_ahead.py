"""Reads ahead what the next pass will need in all of its layers, as far as models that guess tokens know.

What they know of a token orders reads and nothing else. A trial decides whether passes are faster for it, guessing
included.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from moeflow.core.trial import Trial
from moeflow.experts.cache.expert_cache import ExpertCache


class LookAhead:
    """Loads experts before the pass that needs them."""

    def __init__(self, cache: ExpertCache, trial: Trial, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cache = cache
        self.trial = trial
        self._clock = clock
        self._began_s: float | None = None  # when guesses for the next pass did
        self._lacked = False  # whether something that it will need was absent

    @property
    def is_on(self) -> bool:
        """Whether what is expected is read now."""
        return self.trial.is_on

    @property
    def is_asked(self) -> bool:
        """Whether there were guesses for the pass under way, or the next one."""
        return self._began_s is not None

    def begin_guessing(self) -> None:
        """Guesses for the next pass begin now; what they take counts as time of that pass."""
        if self._began_s is None:
            self._began_s = self._clock()

    def expect(self, experts: frozenset[int]) -> None:
        """Receive what the next pass will probably need: numbers over all layers."""
        self._lacked |= bool(self._cache.absent_of(experts))
        if self.trial.is_on:
            self._cache.prefetch_pass(sorted(experts))

    def drop_pass(self) -> None:
        """Forget a pass, such as one that failed: its time tells nothing."""
        self._began_s, self._lacked = None, False

    def end_pass(self, num_tokens: int) -> None:
        """Report to the trial that the pass has ended. A pass that lacked nothing tells nothing about reading."""
        assert self._began_s is not None
        seconds, has_lacked = self._clock() - self._began_s, self._lacked
        self.drop_pass()
        if has_lacked:
            self.trial.end_pass(num_tokens, seconds)
