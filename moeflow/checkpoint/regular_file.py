"""Opens regular files and no others, so that neither a pipe nor a device in a model's place can make anybody wait.

Small files are read whole, but never beyond what files of their kind have: a file may be anything.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from moeflow.checkpoint.file_errors import blame_file
from moeflow.core.errors import CheckpointError
from moeflow.core.units import format_bytes

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_regular(file: Path) -> int:
    """Return a descriptor to read a file with.

    Raises: CheckpointError if it is no regular file, or cannot be opened.
    """
    _check_kind(stat_file(file), file)  # before it is opened, since that alone may wait, or do something to a device
    with blame_file(file):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_kind(os.fstat(descriptor), file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_stream(file: Path) -> BinaryIO:
    """Return the same as a stream. Raises: as `open_regular`."""
    return os.fdopen(open_regular(file), "rb")


def read_whole(file: Path, max_bytes: int) -> bytes:
    """Return what a file holds. Raises: CheckpointError as `open_regular`, or if it holds more than `max_bytes`."""
    with open_stream(file) as stream, blame_file(file):
        data = stream.read(max_bytes + 1) if os.fstat(stream.fileno()).st_size <= max_bytes else None
    if data is None or len(data) > max_bytes:
        raise CheckpointError(
            f"is larger than {format_bytes(max_bytes)}, which no file of this kind is",
            file=file,
            remedy="Download the file again, or check its contents",
        )
    return data


def stat_file(file: Path) -> os.stat_result:
    """Return what a path leads to. Raises: CheckpointError, saying where links lead, if that is nothing."""
    try:
        return os.stat(file)
    except FileNotFoundError:
        if not file.is_symlink():
            raise CheckpointError(
                "is missing", file=file, remedy="Download it from where the rest of the model came"
            ) from None
        raise CheckpointError(
            f"is a symbolic link to {os.readlink(file)}, where there is nothing",
            file=file,
            remedy="Download the file again, or fix the link",
        ) from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            with blame_file(file):
                raise
        raise CheckpointError(
            "is a symbolic link that leads back to itself",
            file=file,
            remedy="Replace the link with the file, or with a link to it",
        ) from None


def _check_kind(found: os.stat_result, file: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise CheckpointError(f"is {kind}, not a regular file", file=file, remedy="Put the model's own file there")
