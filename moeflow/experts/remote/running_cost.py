"""A running estimate of what takes how long: seconds as a sum of two terms, which follow what was seen lately.

Experts take time each, as they are read, and for each pair that is computed; a message takes time for itself and for
its bytes. An observation changes both terms by part of the factor that it was wrong by, the larger one more: so terms
stay positive, and two that always come together need not be told apart. Knows no clock.
"""

from __future__ import annotations

import math
from typing import Final

_STEP: Final = 0.2  # of the factor, in its logarithm
_MOST: Final = 1.5  # of that logarithm: a pass that was stopped for a while says little


class RunningCost:
    """Seconds = x * first_s + y * second_s."""

    def __init__(self, first_s: float, second_s: float) -> None:
        """Begin with what is assumed; a term that is 0 stays so."""
        self.first_s, self.second_s = first_s, second_s

    def seconds(self, x: float, y: float) -> float:
        """Return what so much of both takes."""
        return x * self.first_s + y * self.second_s

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Receive how long so much of both took."""
        expected_s = self.seconds(x, y)
        if seconds <= 0 or expected_s <= 0:
            return
        error = min(max(math.log(seconds / expected_s), -_MOST), _MOST)
        # By roots of the shares: a term that is taken to be far too small would hardly ever grow by the shares alone.
        first, second = math.sqrt(x * self.first_s), math.sqrt(y * self.second_s)
        self.first_s *= math.exp(_STEP * error * first / (first + second))
        self.second_s *= math.exp(_STEP * error * second / (first + second))
