"""How much batch work may slow interactive requests down: a share of the time that they take by themselves.

A pass of one row reads nearly as many weights as one of many, so a few batch tokens in every pass cost much
and bring little. Time is saved up instead: each pass with interactive tokens earns `SLOWDOWN - 1` of its time alone.
Once that pays for the next token of every batch answer, such a pass runs. So the mean
time per token stays within `SLOWDOWN`, and no single pass is longer than `PAUSE` times one without batch tokens.

What passes take is measured, never asked for. Knows no requests, only numbers of tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right

SLOWDOWN = 1.3  # of interactive time per token; 1.5 is promised, the rest is a reserve
PAUSE = 5.0  # likewise, of a single pass
WEIGHT_OF_NEWEST = 0.2
LARGEST_JUMP = 3.0  # a pass that takes longer than that many times the expected was disturbed


class PassTimes:
    """What passes of so many tokens take, learnt from those that were run."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[float, float]] = {}  # octave of tokens -> (mean tokens, mean seconds)

    def note(self, num_tokens: int, elapsed_s: float) -> None:
        """Learn from a pass."""
        octave = num_tokens.bit_length()
        tokens, seconds = self._seconds.get(octave, (float(num_tokens), elapsed_s))
        elapsed_s = min(elapsed_s, seconds * LARGEST_JUMP)
        tokens += WEIGHT_OF_NEWEST * (num_tokens - tokens)
        seconds += WEIGHT_OF_NEWEST * (elapsed_s - seconds)
        self._seconds[octave] = tokens, seconds

    def has_seen(self, num_tokens: int) -> bool:
        """Whether a pass of about so many tokens was measured."""
        return num_tokens.bit_length() in self._seconds

    def expect(self, num_tokens: int) -> float:
        """Return the seconds that a pass of so many tokens would take; at least one pass must have been noted.

        Between measured passes in a straight line, beyond the largest in proportion, below the smallest its time.
        """
        tokens, seconds = 0.0, 0.0
        for next_tokens, next_seconds in self._rising():
            if num_tokens <= next_tokens:
                if not tokens:
                    return next_seconds
                return seconds + (next_seconds - seconds) * (num_tokens - tokens) / (next_tokens - tokens)
            tokens, seconds = next_tokens, next_seconds
        return seconds * num_tokens / tokens

    def _rising(self) -> list[tuple[float, float]]:
        """Return (tokens, seconds), fewest tokens first.

        Fewer tokens never take more time: they were disturbed, as the first pass of all is by memory not yet touched.
        """
        points = []
        min_s = math.inf
        for octave in sorted(self._seconds, reverse=True):
            tokens, seconds = self._seconds[octave]
            min_s = min(min_s, seconds)
            points.append((tokens, min_s))
        return points[::-1]


class LatencyBudget:
    """Limits how many batch tokens may join a pass, and keeps the account."""

    def __init__(self) -> None:
        self._times = PassTimes()
        self._alone_times = PassTimes()  # apart: passes of nearly as many tokens would pass for alone ones
        self._saved_s = 0.0
        self.is_shared = False  # whether there was ever an interactive pass

    def room(self, num_interactive: int, num_wanted: int) -> int:
        """Return how many of the wanted batch tokens may join a pass with so many interactive ones."""
        if not num_interactive:
            return num_wanted
        if not self._alone_times.has_seen(num_interactive):
            return 0  # by itself first, to know what that takes
        alone_s = self._alone_s(num_interactive)
        most = self._max_within_pause(num_interactive, num_wanted)
        extra_s = self._times.expect(num_interactive + most) - alone_s
        return most if extra_s <= self._saved_s + (SLOWDOWN - 1) * alone_s else 0

    def note(self, num_interactive: int, num_batch: int, elapsed_s: float) -> None:
        """Account for a pass that was run."""
        if num_interactive:
            self._account(num_interactive, num_batch, elapsed_s)
        else:
            self._saved_s = 0.0
        self._times.note(num_interactive + num_batch, elapsed_s)

    def _account(self, num_interactive: int, num_batch: int, elapsed_s: float) -> None:
        self.is_shared = True
        is_known = self._alone_times.has_seen(num_interactive)
        alone_s = self._alone_s(num_interactive) if is_known else elapsed_s
        if num_batch:
            alone_s = min(alone_s, elapsed_s)  # never slower than with others: then it was measured long ago
            cost_s = elapsed_s - alone_s
        else:
            self._alone_times.note(num_interactive, elapsed_s)
            cost_s = 0.0
        max_s = (PAUSE - 1) * alone_s  # what one pass may cost: more need not be saved, and is never owed
        self._saved_s += (SLOWDOWN - 1) * alone_s - cost_s
        self._saved_s = min(max(self._saved_s, -max_s), max_s)

    def _alone_s(self, num_interactive: int) -> float:
        """Return what a pass takes without batch tokens: no more than any that had as many tokens."""
        return min(self._alone_times.expect(num_interactive), self._times.expect(num_interactive))

    def _max_within_pause(self, num_interactive: int, num_wanted: int) -> int:
        limit_s = PAUSE * self._alone_s(num_interactive)
        counts = range(1, num_wanted + 1)
        return bisect_right(counts, limit_s, key=lambda count: self._times.expect(num_interactive + count))
