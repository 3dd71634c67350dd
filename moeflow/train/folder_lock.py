"""A folder that one process uses at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeflow.core.errors import ConfigError


@contextmanager
def folder_lock(folder: Path, option: str, *, waits: bool) -> Iterator[None]:
    """Make the folder and hold its lock. The kernel releases it when a process ends.

    `option` sets another folder. Raises: ConfigError if the folder cannot be made, or without `waits` if another
    process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}. Choose another folder ({option})") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise ConfigError(
                f"another process uses {folder}: wait for it, or use another folder ({option})"
            ) from error
        yield
    finally:
        os.close(handle)
