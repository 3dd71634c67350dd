"""The time of jobs and files: a wall clock for stamps, and a cautious one for what cannot be undone.

A wall clock may be set while a server runs, by months if it was wrong. Nothing expires because of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class JobClock:
    """Unix seconds. Its start is the start of the server."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._offset_s = wall() - monotonic()

    def now(self) -> float:
        """Return the wall clock's time."""
        return self._wall()

    def certain(self) -> float:
        """Return a time that has certainly passed: the wall clock's, without any jump forward since the start."""
        return min(self._wall(), self._offset_s + self._monotonic())

    def uptime_s(self) -> float:
        """Return a time that only differences are taken of. It never jumps."""
        return self._monotonic()
