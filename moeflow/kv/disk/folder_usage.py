"""What a folder of extents holds, for people: by model, and how to be rid of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moeflow.kv.disk.extent import SUFFIX, UNFINISHED, read_extent
from moeflow.kv.disk.folder_lock import folder_lock


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """What one model has there; the same one computed in another way counts for itself."""

    model: str
    identity: str
    num_blocks: int
    num_bytes: int
    last_used_s: float  # unix seconds


def folder_usage(folder: Path) -> list[ModelUsage]:
    """Return what a folder holds, the largest first; nothing if it is not there. Raises: OSError."""
    found: dict[tuple[str, str], ModelUsage] = {}
    for file in _extents(folder):
        with suppress(FileNotFoundError):  # deleted by an engine meanwhile
            extent, status = read_extent(file), file.lstat()
            name = ("damaged", "") if extent is None else (extent.model, extent.identity[:8].hex())
            one = found.get(name, ModelUsage(*name, 0, 0, 0.0))
            num_blocks = 0 if extent is None else len(extent.keys)
            found[name] = ModelUsage(
                *name,
                one.num_blocks + num_blocks,
                one.num_bytes + status.st_size,
                max(one.last_used_s, status.st_mtime),
            )
    return sorted(found.values(), key=lambda one: -one.num_bytes)


def folder_bytes(folder: Path) -> int:
    """Return what all extents take on disk; 0 if the folder is not there. Raises: OSError."""
    num_bytes = 0
    for file in _extents(folder):
        with suppress(FileNotFoundError):
            num_bytes += file.lstat().st_size
    return num_bytes


def clear_folder(folder: Path) -> int:
    """Delete all extents, also what a writer that was killed has begun; return how many bytes they took.

    Engines that use them compute again. Raises: OSError.
    """
    if not folder.is_dir():
        return 0
    with folder_lock(folder) as is_mine:
        leftovers = folder.glob(f".*{UNFINISHED}") if is_mine else ()
        return sum(map(_delete, (*_extents(folder), *leftovers)))


def _delete(file: Path) -> int:
    """Return how many bytes a file took, which may be gone by now."""
    with suppress(FileNotFoundError):
        size = file.lstat().st_size
        file.unlink()
        return size
    return 0


def _extents(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (Path(entry.path) for entry in os.scandir(folder) if entry.name.endswith(SUFFIX))
