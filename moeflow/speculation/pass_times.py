"""How long a pass of decodes takes by its number of rows, as measured while serving.

On a Mixture of Experts a further row costs the reads of its experts. That is next to nothing where the pass reads them
anyway, and nearly a whole pass elsewhere. The more rows, the more of their experts are read anyway. So rows beyond the
largest pass seen are expected to cost little until one is measured; otherwise none would ever be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moeflow.core.running_fit import RunningCurve

WEIGHT: Final = 0.15  # of the newest pass, where many are noted
FIRST_SHARE: Final = 0.3  # of a pass: the assumed cost of a further row


class PassTimes(RunningCurve):
    """Seconds by rows."""

    def __init__(self, weight: float = WEIGHT) -> None:
        super().__init__(weight)

    def seconds(self, num_rows: int) -> float | None:
        """Return the expected seconds of a pass; None before the first."""
        return self.expect(num_rows) if self._means else None

    def _slope_beyond(self, points: Sequence[tuple[float, float]]) -> float:
        """See `RunningCurve`: the mean cost of a row so far, or less."""
        (first, first_s), (last, last_s) = points[0], points[-1]
        untried = FIRST_SHARE * last_s / last
        return untried if first == last else min(max(last_s - first_s, 0.0) / (last - first), untried)
