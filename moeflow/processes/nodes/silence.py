"""How long the other end of a connection has been silent, in the running time of this process.

After a pause of this process (its event loop was blocked, or its machine slept), unread messages wait. Such a pause
counts as one short interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from moeflow.processes.nodes.messages import BEAT_S

_MAX_TICK_S = 2 * BEAT_S  # a longer interval between ticks is a pause of this process


class Silence:
    """Call `tick` every `BEAT_S`, and `end` with each message."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted_s = 0.0  # until the last tick
        self._last_s = clock()

    def end(self) -> None:
        """A message has arrived."""
        self._counted_s, self._last_s = 0.0, self._clock()

    def tick(self) -> None:
        """Count the time since the last tick."""
        self._counted_s, self._last_s = self.duration_s, self._clock()

    @property
    def duration_s(self) -> float:
        """The silence until now."""
        return self._counted_s + min(self._clock() - self._last_s, _MAX_TICK_S)
