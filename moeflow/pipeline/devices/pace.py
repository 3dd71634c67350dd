"""Makes work last as long as it would elsewhere: real work first, then sleep until the time is up.

What is paced together runs one after another, as on one link or one processor. Sleeps end a little late; the next
work may make up for that, but for no more (a token bucket that holds a millisecond).
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
        self.charged_s = 0.0  # what all work so far was to take
        self.late_s = 0.0  # by how much work, or the sleep after it, took longer than what is made up for
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = float("-inf")

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """Do what is in the `with` block, and leave it not before so much time is up.

        0 seconds: as fast as it goes, and nothing is late.
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
