"""A folder that appears finished or not at all.

It is built beside its final place under a hidden name and renamed at the end, so a reader never sees half
of it. An exception or Ctrl-C removes the unfinished folder. A killed process leaves its hidden folder behind;
the next build for the same place removes it. A file lock on the hidden folder marks a running build. The kernel drops
it with the process, so reused process ids do no harm.
The contents do not matter here.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeflow.core.durable import sync
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.units import format_bytes


@contextmanager
def build_folder(target: Path, *, need_bytes: int, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends well, and vanishes when it does not.

    It is to be filled with plain files. With `overwrite` an existing model folder is replaced at the very end.

    Raises: ConfigError if the path exists or is not writable, CapacityError if the disk is full.
    """
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        check_place(target, need_bytes=need_bytes, overwrite=overwrite)
        folder, lock = _create_locked(target)
    except OSError as error:
        raise ConfigError(
            f"cannot build in {target.parent}: {error.strerror}. Choose a folder that you may write to"
        ) from error
    try:
        yield folder
        for file in folder.iterdir():
            sync(file)
        sync(folder)
        _put_in_place(folder, target)
        sync(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # renamed by now, unless something went wrong
        os.close(lock)


def check_place(target: Path, *, need_bytes: int, overwrite: bool = False) -> None:
    """Check a target before work that takes long. Its parent exists. Raises: as `build_folder`; OSError."""
    _check_target(target, overwrite=overwrite)
    _check_disk_space(target, need_bytes)


def _check_target(target: Path, *, overwrite: bool) -> None:
    if target.is_dir():
        if not any(target.iterdir()):
            return
        if not (target / "config.json").is_file():
            raise ConfigError(f"{target} is a folder with other things in it, not a model. Choose another place")
        if not overwrite:
            raise ConfigError(f"{target} exists already. Choose another place, or ask to overwrite it (--overwrite)")
    elif target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists and is not a folder. Choose another place")


def _check_disk_space(target: Path, need_bytes: int) -> None:
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < need_bytes:
        raise CapacityError(
            f"not enough disk space for {target}: need {format_bytes(need_bytes)}, have {format_bytes(free_bytes)}. "
            "Free some space, choose a place on another disk, or make a smaller model (fewer experts)"
        )


def _prefix(target: Path) -> str:
    return f".{target.name}.building-"


def _create_locked(target: Path) -> tuple[Path, int]:
    """Make the hidden folder and lock it; another start may take it for a leftover before the lock is on."""
    while True:
        folder = target.parent / f"{_prefix(target)}{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        handle = _try_lock(folder)
        if handle is not None and folder.exists():
            return folder, handle
        if handle is not None:
            os.close(handle)


def _try_lock(folder: Path) -> int | None:
    """Return a handle that holds the folder's lock, or None if another process has it or the folder is gone."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _remove_leftovers(target: Path) -> None:
    """Remove hidden folders for this place whose builders are gone; bring back what a killed swap put aside."""
    aside = _aside(target)
    if aside.exists() and not target.exists():
        aside.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
    for folder in target.parent.iterdir():
        handle = _try_lock(folder) if folder.name.startswith(_prefix(target)) else None
        if handle is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _aside(target: Path) -> Path:
    return target.parent / f".{target.name}.replaced"


def _put_in_place(folder: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        folder.rename(target)
        return
    aside = _aside(target)
    target.rename(aside)
    try:
        folder.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    shutil.rmtree(aside)
