"""Limits that Linux control groups set on this process: memory and processor time, of versions 1 and 2.

A limit of an ancestor binds as tightly as one of the own group, so all levels count as far up as they are mounted.
Reads small files at each call and keeps nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

MEMORY: Final = "memory"
CPU: Final = "cpu"
_UNIFIED: Final = "cgroup2"  # file system of version 2, whose groups have all controllers
_MEMORY_FILES: Final = (  # limit and usage; usage includes cached files
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
)
_RECLAIMABLE: Final = ("inactive_file", "active_file", "slab_reclaimable")  # dirty pages, too: the kernel writes them
_V1_TOTAL: Final = "total_"  # before the fields of version 1 that include groups below
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Memory that all levels of control groups leave."""

    limit_bytes: int  # the smallest
    free_bytes: int  # may be negative


def memory_room(root: Path = Path("/")) -> MemoryRoom | None:
    """Return the memory that control groups leave this process; None: no file tells a limit."""
    limits: list[int] = []
    rooms: list[int] = []
    for folder in group_folders(MEMORY, root):
        cached_bytes = _reclaimable_bytes(folder)
        for limit_name, usage_name in _MEMORY_FILES:
            limit = _number(folder / limit_name)
            if limit is not None:
                limits.append(limit)
                rooms.append(limit - max((_number(folder / usage_name) or 0) - cached_bytes, 0))
    return MemoryRoom(min(limits), min(rooms)) if limits else None


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many cores' time this process may use per second; None: there is no quota."""
    quotas = [quota for folder in group_folders(CPU, root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def group_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's groups with a controller: each group first, then its ancestors."""
    groups = dict(_groups(root))
    folders: list[Path] = []
    for kind, options, mount_root, mount_point in _mounts(root):
        name = "" if kind == _UNIFIED else controller
        if name in groups and (not name or name in options):
            folders += _levels(root / mount_point.lstrip("/"), mount_root, groups[name])
    return list(dict.fromkeys(folders))


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Yield each controller with this process's group; version 2 has an empty name."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if group:
            yield from ((controller, group) for controller in controllers.split(","))


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    """Yield mounts of control groups: file system, options with controllers, mounted group, mount point."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        kind, *_, options = file_system.split() or ["", ""]
        if kind in (_UNIFIED, "cgroup"):
            mount_root, mount_point = (_ESCAPE.sub(_unescaped, field) for field in mount.split()[3:5])
            yield kind, options.split(","), mount_root, mount_point


def _levels(mount_point: Path, mount_root: str, group: str) -> list[Path]:
    """Return the folders of a group and its ancestors within a mount.

    A container may mount its own group alone, and name it from the host or from its namespace.
    """
    path = PurePosixPath(group)
    inner = path.relative_to(mount_root) if path.is_relative_to(mount_root) else PurePosixPath()
    if ".." in inner.parts:  # the process has moved out of its namespace
        inner = PurePosixPath()
    return [mount_point / level for level in (inner, *inner.parents)]


def _reclaimable_bytes(folder: Path) -> int:
    """Return the bytes of a group, and of groups below, that the kernel takes back before the limit kills."""
    fields = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat"))
    return sum(int(fields.get(_V1_TOTAL + name, fields.get(name, 0))) for name in _RECLAIMABLE)


def _quota(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    for line in _lines(folder / "cpu.max"):
        quota, period = (int(word) if word.isdigit() else None for word in line.split())
    return quota / period if quota and period and quota > 0 else None


def _number(file: Path) -> int | None:
    """Return a file's number; None where there is no file, or no limit ("max")."""
    text = "".join(_lines(file))
    return int(text) if text.lstrip("-").isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(found: re.Match[str]) -> str:
    return chr(int(found[1], 8))
