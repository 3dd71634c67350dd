"""Files of control groups below a faked root, as kernels lay them out; and real groups, where the system lets us."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moeflow.core.control_groups import MEMORY, group_folders

UNIFIED = "31 23 0:28 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = "41 31 0:38 {root} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
V1_MEMORY = "35 31 0:32 {root} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def fake_groups(root: Path, own: str, *mounts: str, files: dict[str, str]) -> Path:
    """Write a process's groups, its mounts (a root each), and files below /sys/fs/cgroup; return the root."""
    disk = "22 1 8:1 / / rw - ext4 /dev/vda rw"
    written = {"proc/self/cgroup": own, "proc/self/mountinfo": "\n".join([disk, *mounts])}
    written |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@contextmanager
def limited_group(limit_bytes: int, *, of_parent: bool = False) -> Iterator[Path]:
    """Yield a real group's folder with a limit, its own or its parent's; skip where none can be made."""
    parents = group_folders(MEMORY)
    parent = parents[0] / f"moeflow-test-{os.getpid()}" if parents else None
    try:
        assert parent is not None
        (parent / "inner").mkdir(parents=True)
        limit = next(file for name in ("memory.limit_in_bytes", "memory.max") if (file := parent / name).exists())
        limited = limit if of_parent else parent / "inner" / limit.name
        limited.write_text(str(limit_bytes))
    except (AssertionError, OSError, StopIteration):
        _remove(parent)
        pytest.skip("no control group can be made here")
    try:
        yield parent / "inner"
    finally:
        _remove(parent)


def _remove(parent: Path | None) -> None:
    """Remove a group and its inner one. A process that has just ended may still count."""
    for folder in () if parent is None else (parent / "inner", parent):
        for _ in range(50):
            try:
                folder.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.1)
