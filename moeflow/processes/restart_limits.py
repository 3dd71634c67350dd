"""How often an engine that dies is started again, and how soon. Knows no process.

Two bounds. The other limits consecutive crashes without progress of any request, for an engine that cannot work. Kills
from outside do not count there. One on the restarts of an hour, for one that works a little.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

MAX_PER_HOUR = 100
MAX_FRUITLESS = 5  # crashes in a row, and no token in between
_HOUR_S = 3600.0
_MAX_DELAY_S = 8.0


class RestartLimits:
    """Counts restarts. Report each death, and when a request has come further."""

    def __init__(self, max_per_hour: int = MAX_PER_HOUR, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_per_hour = max_per_hour
        self._clock = clock
        self._times: deque[float] = deque()
        self._num_fruitless = 0
        self.num_restarts = 0

    def note_progress(self) -> None:
        """A request has come further, or has come to its end."""
        self._num_fruitless = 0

    def note_death(self, *, is_from_outside: bool) -> str:
        """Return why the engine is not to be started again; empty: it is."""
        now_s = self._clock()
        while self._times and self._times[0] <= now_s - _HOUR_S:
            self._times.popleft()
        if len(self._times) >= self._max_per_hour:
            return f"{self._max_per_hour} restarts within an hour are all that it may have"
        self._num_fruitless += not is_from_outside
        if self._num_fruitless > MAX_FRUITLESS:
            return f"it has died {self._num_fruitless} times in a row, and no request came any further"
        self._times.append(now_s)
        self.num_restarts += 1
        return ""

    @property
    def delay_s(self) -> float:
        """How long to wait before the next start: not at all, unless it crashes again and again."""
        return 0.0 if self._num_fruitless < 2 else min(2.0 ** (self._num_fruitless - 2), _MAX_DELAY_S)
