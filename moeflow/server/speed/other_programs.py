"""How much of the processor programs beside this server have: they slow its passes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import psutil

from moeflow.server.speed.own_processes import own_processes

_LEAST_S: Final = 1.0  # of all cores, between two looks: the system counts in hundredths


class _Seconds(NamedTuple):
    total: float  # of all cores
    busy: float
    own: float  # of this server's processes


class OtherPrograms:
    """Watches from when it is made; each look tells of the time since the one before."""

    def __init__(self) -> None:
        self._before = _seconds(own_processes())
        self._share: float | None = None

    def look(self, processes: Sequence[psutil.Process]) -> float | None:
        """Return the share of all cores that others than these had since the last look; None: that is too short."""
        now = _seconds(processes)
        total, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        if total >= _LEAST_S:
            self._before = now
            self._share = min(max((busy - own) / total, 0.0), 1.0)
        return self._share


def _seconds(processes: Sequence[psutil.Process]) -> _Seconds:
    times = psutil.cpu_times()
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in others already
    total = sum(times) - guests
    idle = times.idle + getattr(times, "iowait", 0.0)
    return _Seconds(total, total - idle, _own_s(processes))


def _own_s(processes: Sequence[psutil.Process]) -> float:
    """Return the seconds of processes; one that has ended counts in its parent's."""
    found = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system + times.children_user + times.children_system
    return found
