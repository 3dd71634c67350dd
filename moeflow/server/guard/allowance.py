"""So much a minute: a token bucket, which holds one minute's amount and fills evenly.

More may be taken than there is; then it takes longer until the next may be.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_MINUTE_S = 60.0


class Allowance:
    """The rest of an amount per minute."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._at_s = clock()

    def take(self, amount: float) -> None:
        """Take an amount, even if less is left."""
        self._fill()
        self._left -= amount

    def wait_s(self, pending: float = 0.0) -> float:
        """Return the seconds until 1 can be taken, beyond an amount that is still to be taken."""
        self._fill()
        missing = 1.0 + pending - self._left
        return max(missing, 0.0) * _MINUTE_S / self._per_minute

    def _fill(self) -> None:
        now_s = self._clock()
        added = (now_s - self._at_s) * self._per_minute / _MINUTE_S
        self._left, self._at_s = min(self._left + added, float(self._per_minute)), now_s
