"""Running estimates of how long work takes: recent observations count more, and a disturbed one counts little.

`RunningFit` fits seconds to a sum of amounts times coefficients, such as `experts * a + bytes * b`.
`RunningCurve` keeps mean seconds by size and interpolates between sizes. Neither knows a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

OUTLIER: Final = 3.0  # an observation counts as at most this multiple of the expected seconds
LEAST: Final = 16  # observations before `RunningFit` cuts outliers
_PULL: Final = 0.02  # weight of the previous coefficients, as a share of the observations' weight
_LEAST_SHARE: Final = 0.05  # of the expected seconds: a term with less moves as if it had that share
_TINY: Final = 1e-12


class RunningFit:
    """Least squares with fading memory; no coefficient is negative.

    An observation weighs as one over its expected seconds. Amounts in a constant ratio keep the ratio of their
    previous coefficients, because each fit stays close to the fit before it.
    """

    def __init__(self, assumed_s: Sequence[float], memory: float) -> None:
        """Take assumed seconds a unit for each amount; an observation fades after `memory` later ones."""
        size = len(assumed_s)
        self.num_observed = 0
        self._unit_s = list(assumed_s)
        self._fading = 1 - 1 / memory
        self._squares = [[0.0] * size for _ in range(size)]  # weighted sums of products of amounts
        self._products = [0.0] * size  # ... and of these with seconds

    def seconds(self, *amounts: float) -> float:
        """Return how long these amounts are expected to take."""
        return sum(amount * unit_s for amount, unit_s in zip(amounts, self._unit_s, strict=True))

    def observe(self, seconds: float, *amounts: float) -> None:
        """Learn from the total seconds of these amounts."""
        if seconds <= 0:
            return
        expected_s = self.seconds(*amounts)
        if self.num_observed >= LEAST and expected_s > 0:
            seconds = min(seconds, OUTLIER * expected_s)
        weight = 1 / (expected_s or seconds)
        for row, amount in enumerate(amounts):
            self._products[row] = self._products[row] * self._fading + weight * amount * seconds
            for column, other in enumerate(amounts):
                self._squares[row][column] = self._squares[row][column] * self._fading + weight * amount * other
        self.num_observed += 1
        self._unit_s = self._nonnegative()

    def _nonnegative(self) -> list[float]:
        """Return the fit; the smallest coefficient below 0 is held at 0 until none is left."""
        used = list(range(len(self._unit_s)))
        found = [0.0] * len(used)
        while used:
            fit = self._solved(used)
            least = min(range(len(used)), key=fit.__getitem__)
            if fit[least] >= 0:
                for place, value in zip(used, fit, strict=True):
                    found[place] = value
                break
            del used[least]
        return found

    def _solved(self, used: Sequence[int]) -> list[float]:
        """Solve for some coefficients while the others are 0. The matrix is positive definite."""
        squares = {place: max(self._squares[place][place], _TINY) for place in used}
        parts = {place: self._unit_s[place] * math.sqrt(squares[place]) for place in used}
        total = sum(parts.values()) or 1.0
        pulls = {place: _PULL * squares[place] / max(parts[place] / total, _LEAST_SHARE) for place in used}
        rows = [
            [self._squares[row][column] + (pulls[row] if row == column else 0.0) for column in used]
            + [self._products[row] + pulls[row] * self._unit_s[row]]
            for row in used
        ]
        size = len(used)
        for place in range(size):
            for other in range(place + 1, size):
                share = rows[other][place] / rows[place][place]
                rows[other] = [value - share * above for value, above in zip(rows[other], rows[place], strict=True)]
        found = [0.0] * size
        for place in reversed(range(size)):
            rest = sum(rows[place][other] * found[other] for other in range(place + 1, size))
            found[place] = (rows[place][size] - rest) / rows[place][place]
        return found


class RunningCurve:
    """Mean seconds by size."""

    def __init__(self, weight: float, *, cell: Callable[[int], int] = int, is_rising: bool = False) -> None:
        """`weight` is the newest observation's, and sizes with the same `cell` share a mean.

        With `is_rising`, a size takes no longer than any larger one did.
        """
        self._weight, self._cell, self._is_rising = weight, cell, is_rising
        self._means: dict[int, tuple[float, float]] = {}  # by cell: size and seconds

    def note(self, size: int, seconds: float) -> None:
        """Learn how long a size took."""
        cell = self._cell(size)
        mean_size, mean_s = self._means.get(cell, (float(size), seconds))
        mean_size += self._weight * (size - mean_size)
        mean_s += self._weight * (min(seconds, OUTLIER * mean_s) - mean_s)
        self._means[cell] = mean_size, mean_s

    def has_seen(self, size: int) -> bool:
        """Whether a size of the same cell was observed."""
        return self._cell(size) in self._means

    def expect(self, size: float) -> float:
        """Return the expected seconds of a size; at least one must have been observed.

        Between observed sizes on a straight line, below the smallest its seconds, beyond the largest in proportion.
        """
        points = self._points()
        below = None
        for point in points:
            if size <= point[0]:
                if below is None:
                    return point[1]
                return below[1] + (point[1] - below[1]) * (size - below[0]) / (point[0] - below[0])
            below = point
        last_size, last_s = points[-1]
        return last_s + (size - last_size) * self._slope_beyond(points)

    def _slope_beyond(self, points: Sequence[tuple[float, float]]) -> float:
        """Return the seconds of one more unit beyond the largest observed size."""
        size, seconds = points[-1]
        return seconds / size

    def _points(self) -> list[tuple[float, float]]:
        """Return sizes with their seconds, smallest first."""
        points = [self._means[cell] for cell in sorted(self._means)]
        if self._is_rising:
            least_s = math.inf
            for place, (size, seconds) in reversed(list(enumerate(points))):
                least_s = min(least_s, seconds)
                points[place] = size, least_s
        return points
