"""Makes work last as long as on an emulated device: the real work first, then a sleep until the time is up.

Works of one pace run one after another, as on one link or one processor. Sleeps end a little late; the next work may
compensate for that, but for no more (a token bucket that holds a millisecond).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_BURST_S: Final = 1e-3


class Pace:
    """One link or one processor."""

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.charged_s = 0.0  # the planned time of all work so far
        self.late_s = 0.0  # excess of work, or of the sleep after it, beyond the compensation
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = float("-inf")

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """Run the `with` block, and leave it once at least so much time has passed.

        0 seconds: no sleep, and nothing is late.
        """
        if not seconds:
            yield
            return
        deadline = self._book(seconds)
        yield
        left = deadline - self._clock()
        if left > 0:
            self._sleep(left)
        over = self._clock() - deadline
        if over > _BURST_S:
            with self._lock:
                self.late_s += over

    def _book(self, seconds: float) -> float:
        with self._lock:
            self._free_at = max(self._free_at, self._clock() - _BURST_S) + seconds
            self.charged_s += seconds
            return self._free_at
