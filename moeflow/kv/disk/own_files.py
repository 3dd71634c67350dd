"""Whose a folder and its files are. Files written by others could change answers, and files read by others could leak
prompts. So only folders that this user or root controls are used, and only this user's own files. Links are not
followed, nor does a pipe in a file's place make anybody wait.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def distrust(folder: Path) -> str | None:
    """Return why a folder should not be used, as words that follow its path; None: it may be. Raises: OSError."""
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & stat.S_IWOTH:
        return f"can be written by every user (mode {stat.S_IMODE(status.st_mode):03o})"
    return None


def check_folder(folder: Path) -> None:
    """Raises: PermissionError, which says why, for a folder that should not be used; OSError."""
    if why := distrust(folder):
        raise PermissionError(errno.EPERM, f"{why}; make it yours alone (chown, chmod 700)", str(folder))


def open_own(file: Path) -> BinaryIO | None:
    """Open a file to be read; None if others may have written it, or if it is none. Raises: OSError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            return None
        raise
    status = os.fstat(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE
    if not is_own:
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb", buffering=0)


def create_own(file: Path) -> BinaryIO:
    """Make a file that is not there yet, for this user alone, to be written. Raises: OSError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return os.fdopen(descriptor, "wb")
