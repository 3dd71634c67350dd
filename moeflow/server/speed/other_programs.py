"""How much of the processor programs beside this server have: they slow its passes."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import psutil

from moeflow.server.speed.own_processes import own_processes

_LEAST_S: Final = 1.0  # of all cores, between two looks: the system counts in hundredths
_WATCH_S: Final = 5.0  # between two looks that a watching page causes
_MAX_LOOKS: Final = 720  # an hour of watching
_BESIDE_S: Final = 2 * _WATCH_S  # that looks may lie outside of a time that they tell of


class _Seconds(NamedTuple):
    at_s: float  # unix
    total: float  # of all cores
    busy: float
    own: float  # of this server's processes


class OtherPrograms:
    """Watches from when it is made; each look tells of the time since the one before."""

    def __init__(self) -> None:
        self._looks = deque([_seconds(own_processes())], maxlen=_MAX_LOOKS)
        self._share: float | None = None

    def look(self, processes: Sequence[psutil.Process]) -> float | None:
        """Return the share of all cores that others than these had since the last look; None: that is too short."""
        now = _seconds(processes)
        if now.total - self._looks[-1].total >= _LEAST_S:
            self._share = _share(self._looks[-1], now)
            self._looks.append(now)
        return self._share

    def look_now(self) -> float | None:
        """Look, with the processes of this server found anew. Blocks: for some milliseconds."""
        return self.look(own_processes())

    @property
    def is_due(self) -> bool:
        """Whether the last look is so long ago that a watching page needs another."""
        return time.time() - self._looks[-1].at_s >= _WATCH_S

    def share_during(self, start_s: float, end_s: float) -> float | None:
        """Return the share between two times (unix); None: no looks were close to both."""
        before = next((it for it in reversed(self._looks) if it.at_s <= start_s), self._looks[0])
        after = next((it for it in self._looks if it.at_s >= end_s), self._looks[-1])
        strays_s = abs(start_s - before.at_s) + abs(after.at_s - end_s)
        is_close = strays_s <= max(_BESIDE_S, end_s - start_s)
        return _share(before, after) if is_close and after.total - before.total >= _LEAST_S else None


def _share(before: _Seconds, after: _Seconds) -> float:
    others = (after.busy - before.busy) - (after.own - before.own)
    return min(max(others / (after.total - before.total), 0.0), 1.0)


def _seconds(processes: Sequence[psutil.Process]) -> _Seconds:
    times = psutil.cpu_times()
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in others already
    total = sum(times) - guests
    idle = times.idle + getattr(times, "iowait", 0.0)
    return _Seconds(time.time(), total, total - idle, _own_s(processes))


def _own_s(processes: Sequence[psutil.Process]) -> float:
    """Return the seconds of processes; one that has ended counts in its parent's."""
    found = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system + times.children_user + times.children_system
    return found
