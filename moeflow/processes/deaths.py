"""How an engine's process ended, in words, and whether its requests may be the reason.

The kernel counts the processes that it kills for lack of memory. So its SIGKILL differs from one sent by a user. Knows
nothing of requests but their ids.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moeflow.core.control_groups import MEMORY, group_folders

_COUNTERS = ("memory.events", "memory.oom_control")  # of versions 2 and 1
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MEANINGS = {signal.SIGBUS: ", as when a file in use is cut"}


@dataclass(frozen=True, slots=True)
class Death:
    """The end of an engine's process."""

    reason: str
    is_from_outside: bool = False  # somebody ended it: no request is to blame
    in_pass: Mapping[str, int] = field(default_factory=dict)  # requests of the last pass, output tokens they had


@dataclass(frozen=True, slots=True)
class OomKills:
    """How many processes the kernel has killed for lack of memory so far; None where it does not report."""

    of_group: int | None  # in this process's control group, by any limit
    of_system: int | None

    @classmethod
    def read(cls, root: Path = Path("/")) -> OomKills:
        """Read the kernel's counters. A few small files; nothing to wait for."""
        files = (folder / name for folder in group_folders(MEMORY, root) for name in _COUNTERS)
        counts = (_counter(file) for file in files)
        return cls(next((count for count in counts if count is not None), None), _counter(root / "proc/vmstat"))


def name_death(code: int, before: OomKills, after: OomKills) -> Death:
    """Return how a process with this exit code ended. `before` and `after` are counts from either side of its end."""
    if code >= 0:
        return Death(f"exit code {code}")
    number = signal.Signals(-code)
    if number is not signal.SIGKILL:
        return Death(number.name + _MEANINGS.get(number, ""), is_from_outside=number in _FROM_OUTSIDE)
    if _has_risen(before.of_group, after.of_group):
        return Death("SIGKILL: the kernel ended it for lack of memory")
    if _has_risen(before.of_system, after.of_system):
        return Death("SIGKILL: probably for lack of memory, for which the kernel has just killed a process")
    if after.of_group is None and after.of_system is None:
        return Death("SIGKILL: possibly for lack of memory; this system does not report")
    return Death("SIGKILL, not for lack of memory: another process sent it", is_from_outside=True)


def _has_risen(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _counter(path: Path) -> int | None:
    """Return the number after `oom_kill` in a file of names and numbers."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    fields = (line.split() for line in lines)
    return next((int(words[1]) for words in fields if len(words) == 2 and words[0] == "oom_kill"), None)
