"""A process, seen from another one of its machine: whether it has ended, and for how long it has been stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import psutil

_ENDED: Final = ("zombie", "dead")  # in psutil's words
_MAX_LOOK_S: Final = 2.0  # a longer interval between two looks is a pause of the caller


class ProcessWatch:
    """Finds a process by its id, and recognizes it by its start time. Call `look` regularly."""

    def __init__(self, process_id: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.process_id = process_id
        self.has_ended = False  # it may be a zombie
        self.stopped_s = 0.0  # since SIGSTOP, in the caller's running time; 0: it runs
        self.is_stopped = False  # at the last look
        self._clock = clock
        self._last_s = clock()
        try:
            self._process = psutil.Process(process_id)
        except psutil.NoSuchProcess:
            self.has_ended = True

    def look(self) -> None:
        """Bring the attributes up to date."""
        if self.has_ended:
            return
        now_s, before_s, was_stopped = self._clock(), self._last_s, self.is_stopped
        self._last_s = now_s
        try:
            status = self._process.status()
            self.has_ended = status in _ENDED or not self._process.is_running()
        except psutil.NoSuchProcess:
            self.has_ended = True
            return
        self.is_stopped = status == psutil.STATUS_STOPPED
        if self.is_stopped and was_stopped:
            self.stopped_s += min(now_s - before_s, _MAX_LOOK_S)
        else:
            self.stopped_s = 0.0
