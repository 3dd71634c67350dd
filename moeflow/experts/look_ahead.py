"""Reads ahead what the next pass will need in all of its layers, as far as models that guess tokens know.

What they know of a token orders reads and nothing else; a governor asks after every pass for which they guessed whether
that pays, guessing included.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.predict.governor import Governor


class LookAhead:
    """Loads experts before the pass that needs them."""

    def __init__(self, cache: ExpertCache, governor: Governor, clock: Callable[[], float] = time.perf_counter) -> None:
        self.note = ""  # the governor's last message
        self._cache = cache
        self._governor = governor
        self._clock = clock
        self._began_s: float | None = None  # when guesses for the next pass did
        self._lacked = False  # whether something that it will need was absent

    @property
    def is_on(self) -> bool:
        """Whether what is expected is read now."""
        return self._governor.is_on

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
        if self._governor.is_on:
            self._cache.prefetch_pass(sorted(experts))

    def drop_pass(self) -> None:
        """Forget a pass, such as one that failed: its time tells nothing."""
        self._began_s, self._lacked = None, False

    def end_pass(self, num_tokens: int) -> str | None:
        """Report to the governor that the pass has ended; return its message if its verdict is new.

        A pass that was expected to lack nothing tells nothing about reading.
        """
        assert self._began_s is not None
        seconds, has_lacked = self._clock() - self._began_s, self._lacked
        self.drop_pass()
        if not has_lacked:
            return None
        message = self._governor.end_pass(num_tokens, seconds)
        self.note = message or self.note
        return message
