"""Writes packed weights, so that it is there finished or not at all, and so that an interrupted writing can go on.

It grows under a hidden name beside its place and is renamed at the end. Parts are entered in its table once they are on
disk. The next build of the same file verifies these parts by reading, and writes only the others.
A file lock, which the kernel drops with the process, keeps a second writer out.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moeflow.checkpoint.packed.file_io import PAGE_BYTES, drop_cached, read_all, reserve, write_all
from moeflow.checkpoint.packed.layout import (
    PIECE_BYTES,
    SlabSpec,
    checksum,
    decode_entries,
    decode_header,
    encode_entry,
    encode_header,
    encode_table,
    entry_offset,
)
from moeflow.checkpoint.packed.reader import OnBytes, ignore
from moeflow.core.durable import sync
from moeflow.core.errors import CapacityError, CheckpointError, ConfigError
from moeflow.core.units import MIB, format_bytes
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    import shutil

_UNSETTLED_BYTES = 128 * MIB  # that an interruption may cost, and that lie in the page cache at most
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SlabWriter:
    """Takes the parts of one file, in any order; made by `build_packed_weights_file`."""

    def __init__(self, descriptor: int, spec: SlabSpec, on_bytes: OnBytes) -> None:
        self._descriptor = descriptor
        self._spec = spec
        self._checksums: dict[int, int] = {}  # of the parts that are written, by number
        self._unsettled: list[int] = []  # parts that are written but perhaps not on disk
        self._unsettled_bytes = 0
        self._done_bytes = 0
        self._on_bytes = on_bytes

    @property
    def has_parts(self) -> bool:
        """Whether anything is written."""
        return bool(self._checksums)

    def take_over(self, checksums: dict[int, int]) -> None:
        """Count parts as written, which an earlier build left in the file."""
        self._checksums.update(checksums)
        self._done_bytes = sum(map(self._spec.part_bytes, self._checksums))
        self.report()

    def missing(self) -> list[tuple[int, int]]:
        """Return the slabs still to be written, as (layer, expert) in the order of the file."""
        numbers = (number for number in range(self._spec.num_slabs) if number not in self._checksums)
        return [divmod(number, self._spec.num_experts) for number in numbers]

    @property
    def lacks_resident(self) -> bool:
        """Whether weights outside of slabs are still to be written."""
        return bool(self._missing_pieces())

    def write(self, layer: int, expert: int, content: memoryview) -> None:
        """Write one slab, as long as those of its layer are.

        Raises: OSError; `build_packed_weights_file` turns a full disk into a CapacityError.
        """
        number = self._spec.number(layer, expert)
        if content.nbytes != self._spec.part_bytes(number):
            raise ValueError(f"slabs have {self._spec.part_bytes(number)} bytes here, not {content.nbytes}")
        self._write(number, content)

    def write_resident(self, content: memoryview) -> None:
        """Write all weights outside of slabs, `resident_bytes` long, unless they are written. Raises: OSError."""
        if content.nbytes != self._spec.resident_bytes:
            raise ValueError(f"they have {self._spec.resident_bytes} bytes here, not {content.nbytes}")
        for number in self._missing_pieces():
            start = self._spec.offset(number) - self._spec.resident_start
            self._write(number, content[start : start + self._spec.part_bytes(number)])

    def _missing_pieces(self) -> list[int]:
        pieces = range(self._spec.num_slabs, self._spec.num_parts)
        return [number for number in pieces if number not in self._checksums]

    def _write(self, number: int, content: memoryview) -> None:
        write_all(self._descriptor, content, self._spec.offset(number))
        self._checksums[number] = checksum(content)
        self._unsettled.append(number)
        self._unsettled_bytes += content.nbytes
        self._done_bytes += content.nbytes
        if self._unsettled_bytes >= _UNSETTLED_BYTES:
            self.settle()
        self.report()

    def settle(self) -> None:
        """Wait until written parts are on disk, then enter them in the table. Raises: OSError."""
        os.fdatasync(self._descriptor)
        for number in self._unsettled:
            entry = encode_entry(number, self._checksums[number])
            write_all(self._descriptor, memoryview(entry), entry_offset(number))
        self._unsettled.clear()
        self._unsettled_bytes = 0
        drop_cached(self._descriptor, 0, self._spec.file_bytes)

    def finish(self) -> None:
        """Complete the table. Raises: ValueError if parts are missing, OSError."""
        missing = [number for number in range(self._spec.num_parts) if number not in self._checksums]
        if missing:
            raise ValueError(f"{len(missing)} parts were never written, {self._spec.name(missing[0])} first")
        self.settle()
        table = encode_table([self._checksums[number] for number in range(self._spec.num_parts)], self._spec)
        write_all(self._descriptor, memoryview(table), PAGE_BYTES)
        os.fsync(self._descriptor)

    def report(self) -> None:
        """Report the progress of writing."""
        self._on_bytes(self._done_bytes, self._spec.content_bytes)


@contextmanager
def build_packed_weights_file(target: Path, spec: SlabSpec, on_bytes: OnBytes | None = None) -> Iterator[SlabWriter]:
    """Yield a writer; `target` is there, or replaced, when the block ends well.

    When it does not, written parts are kept under a hidden name, and the next build for the same path resumes from
    there. `on_bytes(done, total)` counts those parts too, once they have been read back and found right.

    Raises: ConfigError if the path is not writable or another process writes there. CapacityError if the disk is full,
    before the first write if the file system reports it.
    """
    target = target.absolute()
    partial = partial_file(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_locked(partial)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}. Choose a place that you may write to") from error
    try:
        yield from _build(descriptor, partial, target, spec, on_bytes or ignore)
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise _disk_full(target, spec, descriptor) from error
    finally:
        os.close(descriptor)


def _build(descriptor: int, partial: Path, target: Path, spec: SlabSpec, on_bytes: OnBytes) -> Iterator[SlabWriter]:
    writer = SlabWriter(descriptor, spec, on_bytes)
    goes_on = _is_of(descriptor, partial, spec)
    try:
        if goes_on:
            writer.take_over(_find_written(descriptor, spec))
        else:
            _start(descriptor, spec, target)
        yield writer
        writer.finish()
        partial.rename(target)
    except BaseException:
        if writer.has_parts:
            with suppress(OSError):  # a failing disk: what the table has stays
                writer.settle()
        elif not goes_on:
            partial.unlink()
        raise
    sync(target.parent)


def partial_file(target: Path) -> Path:
    """Return the hidden name under which `target` grows."""
    return target.parent / f".{target.name}.building"


def _open_locked(partial: Path) -> int:
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ConfigError(f"another process is writing {partial}. Wait until it is done") from error
        if partial.exists() and os.path.samestat(os.fstat(descriptor), partial.stat()):
            return descriptor
        os.close(descriptor)  # its last writer has just finished and renamed it


def _start(descriptor: int, spec: SlabSpec, target: Path) -> None:
    os.ftruncate(descriptor, 0)
    if shutil.disk_usage(target.parent).free < spec.file_bytes:
        raise _disk_full(target, spec, descriptor)
    reserve(descriptor, spec.file_bytes)
    write_all(descriptor, memoryview(encode_header(spec)), 0)


def _is_of(descriptor: int, partial: Path, spec: SlabSpec) -> bool:
    page = bytearray(PAGE_BYTES)
    read_all(descriptor, memoryview(page), 0)
    try:
        return decode_header(bytes(page), partial) == spec and os.fstat(descriptor).st_size == spec.file_bytes
    except CheckpointError:
        return False


def _find_written(descriptor: int, spec: SlabSpec) -> dict[int, int]:
    """Read back the parts that the table has; after a power failure it may say more than is true."""
    table = bytearray(spec.table_bytes)
    read_all(descriptor, memoryview(table), PAGE_BYTES)
    buffer = memoryview(bytearray(max(spec.slab_bytes, PIECE_BYTES)))
    found = {}
    for number, expected in enumerate(decode_entries(bytes(table), spec)):
        if expected is None:
            continue
        start, part = spec.offset(number), buffer[: spec.part_bytes(number)]
        if read_all(descriptor, part, start) == part.nbytes and checksum(part) == expected:
            found[number] = expected
        drop_cached(descriptor, start, part.nbytes)
    return found


def _disk_full(target: Path, spec: SlabSpec, descriptor: int) -> CapacityError:
    taken_bytes = os.fstat(descriptor).st_blocks * 512
    free_bytes = shutil.disk_usage(target.parent).free
    return CapacityError(
        f"not enough disk space for {target}: need {format_bytes(max(spec.file_bytes - taken_bytes, 0))} more, "
        f"have {format_bytes(free_bytes)}. Free some space and start again: what is written already is kept; "
        "or choose a place on another disk, or a smaller weight format"
    )
