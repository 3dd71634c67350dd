"""A process, seen from another one of its machine: whether it has ended, and for how long it was stopped or idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import psutil

_ENDED: Final = ("zombie", "dead")  # in psutil's words
_SLEEPING: Final = ("sleeping", "idle")  # not waiting for a disk
_BUSY_SHARE: Final = 0.02  # of a processor: a process that only looks for something uses less
_TICK_S: Final = 0.02  # of the kernel's counters
_MAX_LOOK_S: Final = 2.0  # a longer interval between two looks is a pause of the caller


class ProcessWatch:
    """Finds a process by its id, and recognizes it by its start time. Call `look` regularly."""

    def __init__(self, process_id: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.process_id = process_id
        self.has_ended = False  # it may be a zombie
        self.stopped_s = 0.0  # since SIGSTOP, in the caller's running time; 0: it runs
        self.is_stopped = False  # at the last look
        self.idle_s = 0.0  # without use of a processor or a disk, in the caller's running time
        self._clock = clock
        self._last_s = clock()
        self._used: tuple[float, int] | None = None  # processor time and bytes read, when it was last busy
        try:
            self._process = psutil.Process(process_id)
        except psutil.NoSuchProcess:
            self.has_ended = True

    def expect(self) -> None:
        """Count idle time from now on: before, the process may have had nothing to do."""
        self._used = None

    def look(self) -> None:
        """Bring the attributes up to date."""
        now_s, was_stopped = self._clock(), self.is_stopped
        elapsed_s, self._last_s = min(now_s - self._last_s, _MAX_LOOK_S), now_s
        try:
            status = psutil.STATUS_DEAD if self.has_ended else self._process.status()
            self.has_ended = status in _ENDED or not self._process.is_running()
            used = None if self.has_ended or status not in _SLEEPING else self._read_used()
        except psutil.NoSuchProcess:
            self.has_ended = True
            return
        self.is_stopped = status == psutil.STATUS_STOPPED
        self.stopped_s = self.stopped_s + elapsed_s if self.is_stopped and was_stopped else 0.0
        self.idle_s += elapsed_s
        if used is None or self._used is None or self._is_more(used, self._used):
            self.idle_s, self._used = 0.0, used

    def _is_more(self, used: tuple[float, int], before: tuple[float, int]) -> bool:
        return used[0] - before[0] > _BUSY_SHARE * self.idle_s + _TICK_S or used[1] > before[1]

    def _read_used(self) -> tuple[float, int] | None:
        """Return the processor time, and bytes read from disks, page faults included; None: it is unknown."""
        try:
            with self._process.oneshot():
                times = self._process.cpu_times()
                return times.user + times.system, self._process.io_counters().read_bytes
        except (psutil.AccessDenied, AttributeError):  # only Linux counts bytes
            return None
