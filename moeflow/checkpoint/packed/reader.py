"""Reads slabs into memory and verifies them; several threads may do so at once.

A slab, like any part of the file, is verified by checksum on its first read only. Disks check their data themselves,
but do not notice truncated or overwritten files. Verifying every read would take a tenth of the disk's time (measured:
checksums 30 GB/s, disk 3 GB/s).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Generator
from contextlib import closing

from moeflow.checkpoint.packed.file_io import (
    PAGE_BYTES,
    drop_cached,
    has_direct_reads,
    open_for_reading,
    read_all,
    whole_pages,
)
from moeflow.checkpoint.packed.layout import PACK_AGAIN, PIECE_BYTES, SlabIndex, checksum
from moeflow.core.errors import CheckpointError, StorageError

OnBytes = Callable[[int, int], None]  # bytes done, bytes total

_ATTEMPTS = 3


def ignore(bytes_done: int, bytes_total: int) -> None:
    """Report progress to no one."""


class SlabReader:
    """An open packed weights file."""

    def __init__(self, index: SlabIndex, probe: memoryview) -> None:
        """Open it, past the page cache if reading a page into `probe` shows that this works.

        Raises: CheckpointError if it cannot be opened.
        """
        self.index = index
        self._is_checked = bytearray(index.spec.num_parts)
        try:
            self.is_direct = has_direct_reads(index.path, probe[:PAGE_BYTES])
            self._descriptor = open_for_reading(index.path, direct=self.is_direct)
        except OSError as error:
            remedy = "Check that the file is there and that you may read it"
            raise CheckpointError(f"cannot be opened ({error.strerror})", file=index.path, remedy=remedy) from error

    @property
    def descriptor(self) -> int:
        """The open file."""
        return self._descriptor

    def fill(self, number: int, into: memoryview) -> None:
        """Read a part's pages once, and compare nothing. Raises: OSError."""
        num_bytes = whole_pages(self.index.spec.part_bytes(number))
        position = self.index.spec.offset(number)
        done = read_all(self._descriptor, into[:num_bytes], position)
        if not self.is_direct:
            drop_cached(self._descriptor, position, num_bytes)
        if done < num_bytes:
            raise OSError(errno.EIO, f"the file ends at byte {position + done}: it was cut")

    def check(self, number: int, content: memoryview) -> None:
        """Compare a part with its checksum, if this is its first read. Raises: OSError."""
        if self._is_checked[number]:
            return
        if checksum(content[: self.index.spec.part_bytes(number)]) != self.index.checksums[number]:
            raise OSError(errno.EIO, "its contents have changed since it was written: the checksums differ")
        self._is_checked[number] = 1

    def read(self, number: int, into: memoryview) -> None:
        """Fill `into`, whole pages that a part fits into, and return when it is right.

        Raises: StorageError if it cannot be read, or is damaged, several times in a row.
        """
        for attempt in range(_ATTEMPTS):
            try:
                self.fill(number, into)
                self.check(number, into)
                return
            except OSError as error:
                if attempt == _ATTEMPTS - 1:
                    raise self._failure(number, error) from error

    def close(self) -> None:
        """Release the handle; no read may be under way."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _failure(self, number: int, error: OSError) -> StorageError:
        return StorageError(
            f"{self.index.spec.name(number)}: cannot be read ({error.strerror}), "
            f"tried {_ATTEMPTS} times. Check the disk. {PACK_AGAIN}",
            file=self.index.path,
        )


def damaged_parts(index: SlabIndex, on_bytes: OnBytes) -> Generator[tuple[int, StorageError], None, None]:
    """Read a whole file and compare it with its checksums; yield each part that is damaged or cannot be read."""
    spec = index.spec
    buffer = memoryview(mmap.mmap(-1, whole_pages(max(spec.slab_bytes, PIECE_BYTES))))
    reader = SlabReader(index, buffer)
    done_bytes = 0
    try:
        for number in range(spec.num_parts):
            try:
                reader.read(number, buffer)
            except StorageError as error:
                yield number, error
            done_bytes += spec.part_bytes(number)
            on_bytes(done_bytes, spec.content_bytes)
    finally:
        reader.close()


def verify_packed_weights_file(index: SlabIndex, on_bytes: OnBytes) -> None:
    """Read a file until something is wrong.

    Raises: StorageError, which names the first part that is damaged or cannot be read.
    """
    with closing(damaged_parts(index, on_bytes)) as damaged:
        for _, error in damaged:
            raise error
