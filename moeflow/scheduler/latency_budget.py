"""How much batch work may slow interactive requests down: a share of the time that they take by themselves.

A pass of one row reads nearly as many weights as one of many, so a few batch tokens in every pass cost much
and bring little. Time is saved up instead: each pass with interactive tokens earns `SLOWDOWN - 1` of its time alone.
Once that pays for the next token of every batch answer, such a pass runs. So the mean
time per token stays within `SLOWDOWN`, and no single pass is longer than `PAUSE` times one without batch tokens.

What passes take is measured, never asked for. Knows no requests, only numbers of tokens.
"""

from __future__ import annotations

from bisect import bisect_right

from moeflow.core.running_fit import RunningCurve

SLOWDOWN = 1.3  # of interactive time per token; 1.5 is promised, the rest is a reserve
PAUSE = 5.0  # likewise, of a single pass
WEIGHT_OF_NEWEST = 0.2


def _pass_times() -> RunningCurve:
    """Return the seconds of passes by octaves of tokens.

    Fewer tokens never take longer: such passes were disturbed, as the first of all is by memory not yet touched.
    """
    return RunningCurve(WEIGHT_OF_NEWEST, cell=int.bit_length, is_rising=True)


class LatencyBudget:
    """Limits how many batch tokens may join a pass, and keeps the account."""

    def __init__(self) -> None:
        self._times = _pass_times()
        self._alone_times = _pass_times()  # apart: passes of nearly as many tokens would pass for alone ones
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
