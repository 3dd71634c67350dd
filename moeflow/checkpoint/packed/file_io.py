"""Use of the file system beyond reading and writing: pages, allocation, and bypassing the cache.

The system's page cache would hold a second copy of the data, which counts against a memory limit. So slabs bypass it
(O_DIRECT), or their pages are released at once.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PAGE_BYTES = 4096  # what O_DIRECT wants offsets, lengths and addresses to be multiples of


def whole_pages(num_bytes: int) -> int:
    """Return `num_bytes`, filled up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def open_for_reading(path: Path, *, direct: bool) -> int:
    """Return a descriptor; with `direct`, reads go past the page cache. Raises: OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    return os.open(path, flags | getattr(os, "O_DIRECT", 0) if direct else flags)


def has_direct_reads(path: Path, buffer: memoryview) -> bool:
    """Return whether the file can be read past the page cache into `buffer`, whose length is whole pages.

    Some file systems refuse when opening, others when reading; what else goes wrong is for the first real read.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        descriptor = open_for_reading(path, direct=True)
    except OSError:
        return False
    try:
        os.preadv(descriptor, [buffer], 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def drop_cached(descriptor: int, start: int, num_bytes: int) -> None:
    """Release the cached pages of a range, except unwritten ones."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)


def drop_cached_file(path: Path) -> None:
    """Do so with a whole file that is not needed again soon; one that cannot be opened stays as it is."""
    with contextlib.suppress(OSError):
        descriptor = open_for_reading(path, direct=False)
        try:
            drop_cached(descriptor, 0, 0)  # to its end
        finally:
            os.close(descriptor)


def reserve(descriptor: int, num_bytes: int) -> None:
    """Set the file's length and allocate its space on disk. Raises: OSError (ENOSPC, EDQUOT)."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:
        os.ftruncate(descriptor, num_bytes)


def write_all(descriptor: int, content: memoryview, start: int) -> None:
    """Write all bytes at `start`. Raises: OSError."""
    view = content.cast("B")
    done = 0
    while done < view.nbytes:
        done += os.pwrite(descriptor, view[done:], start + done)


def read_all(descriptor: int, into: memoryview, start: int) -> int:
    """Fill `into` from `start` on and return how many bytes there were: fewer only at the end of the file.

    Raises: OSError.
    """
    view = into.cast("B")
    done = 0
    while done < view.nbytes:
        count = os.preadv(descriptor, [view[done:]], start + done)
        done += count
        if count == 0 or done % PAGE_BYTES:  # the end; a direct read cannot go on from the middle of a page
            break
    return done
