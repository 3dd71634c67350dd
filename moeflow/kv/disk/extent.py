"""A file of blocks that follow each other in one prefix: written in a row, read in a few large pieces.

    from 0          the blocks, `block_bytes` each
    then            the description (msgpack): whose they are, their keys and checksums
    then            the trailer: length and checksum of the description, magic

It appears under its name when it is complete. A kill leaves a file under another name. A loss of power may leave
unwritten pages: the trailer shows whether there is a description, the checksums show the valid blocks. So nothing has
to wait for the disk. Checksums are CRC-32, as those of packed weights.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from isal import isal_zlib

from moeflow.kv.disk.block_keys import KEY_BYTES
from moeflow.kv.disk.own_files import open_own

SUFFIX: Final = ".moekv"  # that no other program uses, since these files are deleted
UNFINISHED: Final = SUFFIX + ".tmp"
FORMAT_VERSION: Final = 1

_MAGIC: Final = b"MOEKV\n\0\0"
_TRAILER: Final = struct.Struct("<II8s")  # bytes of the description, its checksum, magic
_CHECKSUM: Final = struct.Struct("<I")
_MOST_NAMED: Final = 200  # characters of a model's name
_MOST_DESCRIBED: Final = 16 * 1024**2  # bytes of a description: no file that was written here has more


class _Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = FORMAT_VERSION
    model: str  # as people call it
    identity: bytes
    block_bytes: int
    keys: bytes  # KEY_BYTES for each block
    checksums: bytes  # likewise 4


@dataclass(frozen=True, slots=True)
class Extent:
    """A file, as its end describes it."""

    path: Path
    model: str
    identity: bytes
    block_bytes: int
    keys: tuple[bytes, ...]
    checksums: tuple[int, ...]

    def is_whole(self, position: int, content: memoryview) -> bool:
        """Return whether the bytes read for the block at this position match its checksum."""
        return isal_zlib.crc32(content) == self.checksums[position]


class ExtentWriter:
    """Appends blocks to a new file, and then their description."""

    def __init__(self, stream: BinaryIO, *, model: str, identity: bytes, block_bytes: int) -> None:
        self._stream = stream
        self._model, self._identity, self._block_bytes = model, identity, block_bytes
        self._checksums: list[int] = []

    def append(self, blocks: memoryview) -> None:
        """Write one block or several. Raises: OSError."""
        for start in range(0, len(blocks), self._block_bytes):
            self._checksums.append(isal_zlib.crc32(blocks[start : start + self._block_bytes]))
        self._stream.write(blocks)

    def finish(self, keys: Sequence[bytes]) -> None:
        """Write what the blocks are. Raises: OSError."""
        assert len(keys) == len(self._checksums)
        text = msgspec.msgpack.encode(
            _Description(
                model=self._model[:_MOST_NAMED],
                identity=self._identity,
                block_bytes=self._block_bytes,
                keys=b"".join(keys),
                checksums=b"".join(map(_CHECKSUM.pack, self._checksums)),
            )
        )
        self._stream.write(text + _TRAILER.pack(len(text), isal_zlib.crc32(text), _MAGIC))


def described_bytes(num_blocks: int) -> int:
    """Return what description and trailer take at most."""
    return num_blocks * (KEY_BYTES + _CHECKSUM.size) + 1024


def read_extent(path: Path) -> Extent | None:
    """Return what a file holds; None if it is not whole, not of this version, or not this user's. Raises: OSError."""
    stream = open_own(path)
    if stream is None:
        return None
    with stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        found = _read_description(stream, num_bytes)
    if found is None or found.version != FORMAT_VERSION:
        return None
    num_blocks = len(found.keys) // KEY_BYTES
    keys = tuple(found.keys[start : start + KEY_BYTES] for start in range(0, num_blocks * KEY_BYTES, KEY_BYTES))
    checksums = tuple(value for (value,) in _CHECKSUM.iter_unpack(found.checksums))
    return Extent(path, found.model, found.identity, found.block_bytes, keys, checksums)


def read_blocks(stream: BinaryIO, extent: Extent, first: int, into: memoryview) -> Iterable[bool]:
    """Fill `into` with blocks from position `first` on, as many as fit.

    Yields, for each, whether it is whole. Raises: OSError.
    """
    size = extent.block_bytes
    stream.seek(first * size)
    num_read = 0
    while more := stream.readinto(into[num_read:]):  # type: ignore[attr-defined]  # which raw and buffered files have
        num_read += more  # network file systems give less at once than was asked for
    for index in range(len(into) // size):
        block = into[index * size : (index + 1) * size]
        yield num_read >= (index + 1) * size and extent.is_whole(first + index, block)


def _read_description(stream: BinaryIO, num_bytes: int) -> _Description | None:
    if num_bytes < _TRAILER.size:
        return None
    stream.seek(num_bytes - _TRAILER.size)
    trailer = stream.read(_TRAILER.size)
    if len(trailer) < _TRAILER.size:
        return None
    length, expected, magic = _TRAILER.unpack(trailer)
    start = num_bytes - _TRAILER.size - length
    if magic != _MAGIC or length > _MOST_DESCRIBED or start < 0:
        return None
    stream.seek(start)
    text = stream.read(length)
    if len(text) != length or isal_zlib.crc32(text) != expected:
        return None
    try:
        found = msgspec.msgpack.decode(text, type=_Description)
    except msgspec.MsgspecError:
        return None
    num_blocks = len(found.keys) // KEY_BYTES
    is_sound = len(found.keys) == num_blocks * KEY_BYTES and len(found.checksums) == num_blocks * _CHECKSUM.size
    return found if is_sound and found.block_bytes > 0 and start == num_blocks * found.block_bytes else None
