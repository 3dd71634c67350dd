"""How long a pass of decodes takes by its number of rows, as measured while serving.

On a Mixture of Experts a further row costs what its experts cost to read: next to nothing where they are read anyhow,
nearly a whole pass where nobody else needs them. What the rows are is not known beforehand, so the mean of passes of
that size has to do; it follows the load. The more rows, the more of their experts are read anyhow, so what a pass
larger than any before takes is hoped to be little, until it is measured: else it never would be.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

WEIGHT: Final = 0.15  # of the newest pass, where many are noted
FIRST_SHARE: Final = 0.3  # of a pass that a further row is taken to cost before any has been seen
OUTLIER: Final = 3.0  # a pass that takes so many times as long as expected was disturbed


class PassTimes:
    """Seconds by rows."""

    def __init__(self, weight: float = WEIGHT) -> None:
        """`weight` is that of the newest pass."""
        self._weight = weight
        self._seconds: dict[int, float] = {}
        self._rows: list[int] = []  # those that are known, ascending

    def note(self, num_rows: int, seconds: float) -> None:
        """Count a pass."""
        known = self._seconds.get(num_rows)
        if known is None:
            self._rows.insert(bisect_left(self._rows, num_rows), num_rows)
            self._seconds[num_rows] = seconds
        else:
            self._seconds[num_rows] = known + self._weight * (min(seconds, OUTLIER * known) - known)

    def seconds(self, num_rows: int) -> float | None:
        """Return what a pass is expected to take; None: nothing is known yet."""
        if not self._rows:
            return None
        after = bisect_left(self._rows, num_rows)
        if after < len(self._rows) and self._rows[after] == num_rows:
            return self._seconds[num_rows]
        if after == 0:  # fewer rows than any pass had
            return self._seconds[self._rows[0]]
        low = self._rows[after - 1]
        if after == len(self._rows):
            return self._seconds[low] + (num_rows - low) * self._slope_beyond()
        high = self._rows[after]
        share = (num_rows - low) / (high - low)
        return self._seconds[low] + share * (self._seconds[high] - self._seconds[low])

    def _slope_beyond(self) -> float:
        """Return what a row beyond the largest pass is expected to cost."""
        first, last = self._rows[0], self._rows[-1]
        untried = FIRST_SHARE * self._seconds[last] / last
        if first == last:
            return untried
        slope = max(self._seconds[last] - self._seconds[first], 0.0) / (last - first)
        return min(slope, untried)
