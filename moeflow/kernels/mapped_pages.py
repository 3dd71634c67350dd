"""The sizes of a mapped file's pages in memory, and how small ones become large.

A large page maps 2 MiB, a small one 4 KiB. The pages of a file in the system's cache depend on how it was read. Every
call here is made without the interpreter's lock. Linux alone tells.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import address

LARGE_PAGE_BYTES: Final = 2 * 1024**2
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ and MADV_COLLAPSE, which Python does not name: Linux 5.14, Linux 6.1
_COLLAPSE: Final = 25
_PAGEMAP_SCAN: Final = 0xC0606610  # Linux 6.7: ioctl of /proc/self/pagemap with a struct pm_scan_arg
_SCAN_ARGUMENT: Final = struct.Struct("12Q")
_WALK_END: Final = 4  # the field with the end of the scan
_IS_FILE, _IS_PRESENT, _IS_HUGE = 1 << 2, 1 << 3, 1 << 6
_MAX_REGIONS: Final = 1024  # found by a scan before it stops


class MappedPages:
    """A file that is mapped as it lies, with a descriptor of it."""

    def __init__(self, content: NDArray[np.uint8], ranges: Sequence[range], descriptor: int) -> None:
        """Take the mapping, [bytes] uint8, with `ranges` already loaded."""
        self._content = content
        self._start = address(content)
        self._descriptor = descriptor
        self._ranges = ranges
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.can_tell = self._has_scan()

    def small(self) -> list[int]:
        """Return where large pages could be and small ones of the file are, as offsets of `LARGE_PAGE_BYTES` each.

        Where the system does not tell (`can_tell`), wherever large pages could be.
        """
        if self._start % LARGE_PAGE_BYTES:  # the system maps large pages only where addresses and offsets agree
            return []
        regions = self._regions(_IS_FILE | _IS_PRESENT | _IS_HUGE, _IS_HUGE) if self.can_tell else self._ranges
        return [start for region in regions for start in _whole_pages(region)]

    def is_small(self, start: int) -> bool:
        """Return whether that large page's place has small pages of the file, each of them and nothing else."""
        stop = start + LARGE_PAGE_BYTES
        return self._regions(_IS_FILE | _IS_PRESENT | _IS_HUGE, _IS_HUGE, range(start, stop)) == [range(start, stop)]

    def large_bytes(self) -> int:
        """Return how many bytes lie on large pages, where the system tells."""
        return sum(map(len, self._regions(_IS_HUGE, 0)))

    def settle(self) -> None:
        """Wait until all of the file is on disk, which it may not be yet if it was just copied. Raises: OSError."""
        os.fdatasync(self._descriptor)

    def collapse(self, start: int) -> None:
        """Have the system copy small pages into a large one. Raises: OSError; EINVAL where it cannot with this file."""
        self._advise(_COLLAPSE, start)

    def read_again(self, start: int) -> None:
        """Drop small pages of the file, which are on disk, and read them again, into a large page if there is one.

        Raises: OSError if they cannot be read; a later access would end the process by a signal.
        """
        self._advise(mmap.MADV_DONTNEED, start)
        os.posix_fadvise(self._descriptor, start, LARGE_PAGE_BYTES, os.POSIX_FADV_DONTNEED)
        self._advise(_POPULATE_READ, start)

    def _advise(self, advice: int, start: int) -> None:
        if self._madvise(self._start + start, LARGE_PAGE_BYTES, advice):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _has_scan(self) -> bool:
        try:
            self._regions(_IS_HUGE, 0, range(LARGE_PAGE_BYTES))
        except OSError:  # an older system, or one without /proc
            return False
        return True

    def _regions(self, categories: int, inverted: int, within: range | None = None) -> list[range]:
        """Return the bytes of pages in all these categories, and in none of the `inverted` ones."""
        stop = self._start + (self._content.nbytes if within is None else within.stop)
        position = self._start + (0 if within is None else within.start)
        found = np.empty((_MAX_REGIONS, 3), np.uint64)  # start, end, categories
        regions: list[range] = []
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            while position < stop:
                fields = [_SCAN_ARGUMENT.size, 0, position, stop, 0, address(found), _MAX_REGIONS, 0]
                argument = bytearray(_SCAN_ARGUMENT.pack(*fields, inverted, categories, 0, categories))
                count = fcntl.ioctl(descriptor, _PAGEMAP_SCAN, argument)
                regions += [range(first - self._start, last - self._start) for first, last, _ in found[:count].tolist()]
                position = _SCAN_ARGUMENT.unpack(argument)[_WALK_END]
        finally:
            os.close(descriptor)
        return regions


def _whole_pages(region: range) -> range:
    first = -(-region.start // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    return range(first, region.stop - LARGE_PAGE_BYTES + 1, LARGE_PAGE_BYTES)
