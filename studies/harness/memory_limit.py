"""A limit on the memory and page cache of processes: a cgroup of version 1 or 2."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from moeflow.core.errors import ConfigError

_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Version:
    """The names of a version's files."""

    limit: str
    peak: str


_V1 = _Version("memory.limit_in_bytes", "memory.max_usage_in_bytes")
_V2 = _Version("memory.max", "memory.peak")


class MemoryLimit:
    """A group below this process's own, removed at the end of a `with` block, when its processes have ended."""

    def __init__(self, name: str, limit_bytes: int | None) -> None:
        """Make the group; without a limit it only counts. Raises: ConfigError if the system forbids it."""
        parent, self._version = _own_group()
        self._folder = parent / f"moeflow-{os.getpid()}-{name}"
        try:
            self._folder.mkdir()
            if limit_bytes is not None:
                (self._folder / self._version.limit).write_text(str(limit_bytes))
        except OSError as error:
            raise ConfigError(f"no limit can be set in {parent} ({error.strerror}); run this as root") from error

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words before a command that start it inside the group."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._folder / "cgroup.procs"))

    @property
    def peak_bytes(self) -> int:
        """The largest sum of the group's memory and page cache."""
        return int((self._folder / self._version.peak).read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(50):  # a process that has just ended may still count
            try:
                self._folder.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def _own_group() -> tuple[Path, _Version]:
    groups = Path("/proc/self/cgroup").read_text()
    if found := re.search(r"^\d+:memory:/(.*)$", groups, re.MULTILINE):
        return _MOUNT / "memory" / found[1], _V1
    found = re.search(r"^0::/(.*)$", groups, re.MULTILINE)
    return _MOUNT / (found[1] if found else ""), _V2
