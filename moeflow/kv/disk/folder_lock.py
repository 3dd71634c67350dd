"""The lock of a folder of extents: only its holder writes there."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOCK_S: Final = 5.0  # longest wait for another writer: what cannot be written then is left out
LOCK_NAME: Final = "lock"

_POLL_S: Final = 0.01


@contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Have the folder's lock, or yield False if others keep it for long. Raises: OSError."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)  # which gives it back


def _lock(descriptor: int) -> bool:
    until_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        else:
            return True
