"""How long a pass of decodes takes by the experts it needs, as measured while serving.

On a Mixture of Experts a further row costs what its experts cost: nothing where the pass needs them anyway, a read of
memory where they are resident, and a read from disk where they are not. Where models that guess say which experts a
row will need, `base + each * experts + read * absent` is fitted to the passes seen, recent ones counting more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MEMORY: Final = 128.0  # passes after which earlier ones count for little
LEAST_PASSES: Final = 16  # from which the fit is used
OUTLIER: Final = 3.0  # a pass that takes so many times as long as expected was disturbed
_RIDGE: Final = 1e-6  # share of a sum of squares that is added to it: experts and absent ones may never have differed


class ExpertTimes:
    """Seconds by the numbers of distinct experts, and of those of them that are absent."""

    def __init__(self) -> None:
        self._num_passes = 0
        self._squares = [[0.0] * 3 for _ in range(3)]  # sums of products of 1, experts and absent
        self._products = [0.0] * 3  # of these with seconds
        self._fit = [0.0] * 3  # seconds of each; none below 0

    def note(self, num_experts: float, num_absent: float, seconds: float) -> None:
        """Count a pass."""
        expected = self.seconds(num_experts, num_absent)
        if expected is not None:
            seconds = min(seconds, OUTLIER * expected)
        features = (1.0, num_experts, num_absent)
        fading = 1 - 1 / MEMORY
        for row, feature in enumerate(features):
            self._products[row] = self._products[row] * fading + feature * seconds
            for column, other in enumerate(features):
                self._squares[row][column] = self._squares[row][column] * fading + feature * other
        self._num_passes += 1
        self._fit = _nonnegative_fit(self._squares, self._products)

    def seconds(self, num_experts: float, num_absent: float) -> float | None:
        """Return what a pass is expected to take; None: too little is known yet."""
        if self._num_passes < LEAST_PASSES:
            return None
        return self._fit[0] + self.added_s(num_experts, num_absent)

    def added_s(self, num_experts: float, num_absent: float) -> float:
        """Return what experts add to a pass."""
        _, each, read = self._fit
        return each * num_experts + read * num_absent


def _nonnegative_fit(squares: Sequence[Sequence[float]], products: Sequence[float]) -> list[float]:
    """Return the coefficients of least squares; while one is below 0, the least is held at 0 and the rest fitted."""
    used = list(range(len(products)))
    while used:
        fit = _solved([[squares[row][column] for column in used] for row in used], [products[row] for row in used])
        least = min(range(len(used)), key=fit.__getitem__)
        if fit[least] >= 0:
            break
        del used[least], fit[least]
    else:
        fit = []
    found = [0.0] * len(products)
    for place, value in zip(used, fit, strict=True):
        found[place] = value
    return found


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric system that has no negative eigenvalue."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for place, row in enumerate(rows):
        row[place] = row[place] * (1 + _RIDGE) + 1e-12
    for place in range(size):
        for other in range(place + 1, size):
            share = rows[other][place] / rows[place][place]
            rows[other] = [value - share * above for value, above in zip(rows[other], rows[place], strict=True)]
    found = [0.0] * size
    for place in reversed(range(size)):
        rest = sum(rows[place][other] * found[other] for other in range(place + 1, size))
        found[place] = (rows[place][size] - rest) / rows[place][place]
    return found
