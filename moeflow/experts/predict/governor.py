"""Lets a predictor prefetch only where passes are faster for it: measured by the clock, again and again.

Bytes that were guessed right say too little. A prefetch hides at most the time that a layer computes, a wrong one
delays what is read on demand, and to start one costs time, too: where three of four guesses were right, a model with
its experts on a busy disk became slower by a seventh (and BigMoeOnEdge's by 21% with 79% right).

A trial alternates between a few passes without and a few with prefetches until the difference is certain or will not
matter. Its verdict stands for a while, twice as long each time that the next trial confirms it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

ARM_PASSES: Final = 4  # in a row with, or without
TRUST: Final = 3
MIN_PASSES: Final = 8  # of each kind, before anything is concluded
_MAX_PASSES: Final = 64
_MIN_GAIN: Final = 0.05  # as a logarithm: about the share of time. Less is not worth the disk's wear
_CERTAIN: Final = 3.0  # standard errors: it is asked again and again
_FIRST_REST: Final = 512  # passes
_LONGEST_REST: Final = 16384
_LEARNING: Final = 0.1  # weight of a new pass in what passes of its size usually take


class Governor:
    """Decides for one predictor whether it may prefetch."""

    def __init__(self, name: str, *, is_trusted: bool = False) -> None:
        """Begin a trial; `name` is for messages.

        It begins with passes without prefetches, and has as many with them; where they are trusted it begins with
        these, and has `TRUST` times as many.
        """
        self.is_on = self._is_trusted = is_trusted
        self._name = name
        self._usual: dict[int, float] = {}  # logarithm of a pass's seconds, by its tokens
        self._in_arm = 0  # passes of the trial in a row with, or without
        self._surprises: tuple[list[float], list[float]] = ([], [])  # of the trial: without prefetches, with
        self._verdict: bool | None = None  # of the last trial
        self._rest = 0  # passes for which it still stands
        self._next_rest = _FIRST_REST

    def end_pass(self, num_tokens: int, seconds: float) -> str | None:
        """Take a pass's duration into account; return a message if a verdict is new."""
        surprise = self._surprise(num_tokens, math.log(max(seconds, 1e-9)))
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self.is_on, self._in_arm = self._is_trusted, 0
            return None
        if surprise is None:
            return None
        without, with_it = self._surprises
        (with_it if self.is_on else without).append(surprise)
        self._in_arm += 1
        if self._in_arm == ARM_PASSES * (TRUST if self.is_on and self._is_trusted else 1):
            self.is_on, self._in_arm = not self.is_on, 0
        verdict = _verdict(without, with_it)
        return None if verdict is None else self._settle(verdict)

    def _surprise(self, num_tokens: int, log_s: float) -> float | None:
        """Return how much longer a pass took than one of its size usually does; None for the first of its size."""
        usual = self._usual.get(num_tokens)
        if usual is None:
            self._usual[num_tokens] = log_s
            return None
        self._usual[num_tokens] = usual + _LEARNING * (log_s - usual)
        return log_s - usual

    def _settle(self, verdict: bool) -> str | None:
        without, with_it = self._surprises
        change = math.expm1(_mean(with_it) - _mean(without))
        is_new, self._verdict = verdict is not self._verdict, verdict
        self._next_rest = _FIRST_REST if is_new else min(2 * self._next_rest, _LONGEST_REST)
        self._rest, self.is_on, self._surprises = self._next_rest, verdict, ([], [])
        if not is_new:
            return None
        change_text = f"passes take {abs(change):.0%} {'more' if change > 0 else 'less'} time with it"
        return f"prefetching by {self._name} is switched {'on' if verdict else 'off'}: {change_text}"


def _verdict(without: Sequence[float], with_it: Sequence[float]) -> bool | None:
    """Return whether prefetching pays, or None as long as that is open."""
    fewer = min(len(without), len(with_it))
    if fewer < MIN_PASSES:
        return None
    gain = _mean(without) - _mean(with_it)
    error = _CERTAIN * math.sqrt(_variance(without) / len(without) + _variance(with_it) / len(with_it))
    if gain - error > 0 and gain > _MIN_GAIN:
        return True
    if gain + error < _MIN_GAIN or fewer >= _MAX_PASSES:
        return False
    return None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
