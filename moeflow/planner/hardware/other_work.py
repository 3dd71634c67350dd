"""How much of the processor others take while something is measured, as the system counts it.

Others are other processes, and other guests that the hypervisor gives the cores to ("steal"). Where the system does not
report others, assumes that there are none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

DISTURBING: Final = 0.1  # share of the processor from which on a measurement is not to be trusted
_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)  # fields of its first line: idle, waiting for a disk
_NUM_FIELDS: Final = 8  # those after it are counted in others already


class OtherWork:
    """Watches from when it is made."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._began = self._sample()

    @property
    def share(self) -> float:
        """Share of all cores that others have had since."""
        if self._began is None or (now := self._sample()) is None:
            return 0.0
        total, busy, own = (after - before for after, before in zip(now, self._began, strict=True))
        return min(max((busy - own) / total, 0.0), 1.0) if total > 0 else 0.0

    def _sample(self) -> tuple[float, float, float] | None:
        """Return total seconds of all cores: (that passed, that were busy, that this process had)."""
        try:
            fields = self._stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1 : 1 + _NUM_FIELDS]
            ticks = [float(field) / os.sysconf("SC_CLK_TCK") for field in fields]
            idle = sum(ticks[number] for number in _IDLE)
        except (OSError, ValueError, IndexError):
            return None
        own = os.times()
        return sum(ticks), sum(ticks) - idle, own.user + own.system
