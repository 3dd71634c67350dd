"""The header of a GGUF file, a model or a part of one: its metadata, which tensors it holds and where.

Reads and checks the format by its specification. The gguf package's reader trusts every count and length in the file: a
damaged file may cause a loop of 2**60 steps or truncated tensors. It also takes seconds for a vocabulary. Knows nothing
of models.

Source: docs/gguf.md in the ggml repository; versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np

from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN, blame_file, check_num_tensors, refuse_lfs_pointer
from moeflow.checkpoint.gguf.tensor_types import BLOCK_SIZES, SUPPORTED, TensorType
from moeflow.checkpoint.regular_file import open_stream
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated_repr

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_RANK = 4
_MAX_NAME = 1 << 16  # bytes of a key, by the specification, or of a tensor's name
_MAX_STRING = 1 << 24  # bytes; the longest that are known are chat templates
_MAX_ITEMS = 1 << 20  # of an array; the longest that are known are merges of vocabularies, half as many
_MAX_ALL_ITEMS = 1 << 22  # total of all arrays
_MANY_ITEMS = 1 << 12  # of an array: as only vocabularies have them
_PIECE_BYTES = 1 << 20  # smaller than that, so that a string within a piece is never too long
_LENGTH = struct.Struct("<Q")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_DROPPED = {  # types, whose rows were put in another order for some processors
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
_IK_TYPES = 97  # from here on
_NOTHING: Final[Mapping[str, Collection[str]]] = {}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first, as in torch
    quantization: TensorType
    file: Path
    start: int  # byte in the file
    num_bytes: int


class PassedArray(msgspec.Struct, frozen=True):
    """An array that was not kept, to be compared with others."""

    kind: int
    count: int
    checksum: int  # CRC-32 of its bytes
    places: dict[str, int] = {}  # of the strings in it that were sought


class GGUFHeader(msgspec.Struct, frozen=True):
    """All that stands before the weights."""

    file: Path
    metadata: Mapping[str, Any]  # numbers, bools, strings and lists of these, or the rest of such a list
    tensors: dict[str, GGUFTensor]


def read_gguf_header(
    file: Path, *, with_vocabulary: bool = True, sought: Mapping[str, Collection[str]] = _NOTHING
) -> GGUFHeader:
    """Return metadata and tensors of a file; the first of several parts may have no tensors.

    A model's weights need no vocabulary, whose hundreds of thousands of strings take time and memory. Without it, of
    arrays as long as that it is known only whether they are others' (`PassedArray`). `sought` names strings by the key
    of their array; a `PassedArray` has their places.

    Raises: CheckpointError if the file is missing, cut or damaged, or holds a tensor of a type that is not
    among `SUPPORTED`.
    """
    with open_stream(file) as stream, blame_file(file):
        cursor = _Cursor(stream, file)
        metadata, tensors = _read_entries(cursor, _MAX_ITEMS if with_vocabulary else _MANY_ITEMS, sought)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {truncated_repr(alignment)}, where a power of two is expected")
    data_start = -(-cursor.position // alignment) * alignment
    placed = [_place(tensor, data_start, alignment, cursor) for tensor in tensors]
    _check_layout(placed, data_start, alignment, cursor)
    return GGUFHeader(file, metadata, {tensor.name: tensor for tensor in placed})


def gguf_header_bytes(file: Path) -> int | None:
    """Return how many bytes the header takes; None: more than there are of the file, which may be its beginning alone.

    Raises: CheckpointError if what there is of it is damaged.
    """
    with open_stream(file) as stream, blame_file(file):
        cursor = _Cursor(stream, file)
        try:
            _read_entries(cursor, _MAX_ITEMS)
        except _CutHeaderError:
            return None
        return cursor.position


class _CutHeaderError(CheckpointError):
    """The header continues past the file's end."""


class _Cursor:
    """Reads values one after another, none past the file's end."""

    def __init__(self, stream: BinaryIO, file: Path) -> None:
        self.file = file
        self.position = 0
        self.size = stream.seek(0, 2)
        stream.seek(0)
        self._stream = stream
        self._items_left = _MAX_ALL_ITEMS

    def take(self, num_bytes: int) -> bytes:
        data = self._stream.read(num_bytes) if num_bytes <= self.size - self.position else b""
        if len(data) < num_bytes:
            problem = f"is truncated: the header continues past the file's {self.size} bytes"
            raise _CutHeaderError(problem, file=self.file, remedy=DOWNLOAD_AGAIN)
        self.position += num_bytes
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def length(self, most: int) -> int:
        value: int = self.number("Q")
        if value > most:
            raise self.damaged(f"has a string or array of length {value} at byte {self.position - 8}, beyond {most}")
        return value

    def string(self, most: int = _MAX_STRING) -> str:
        return self._text(self.take(self.length(most)), self.position)

    def num_items(self) -> int:
        """Return the length of an array that comes now."""
        count = self.length(_MAX_ITEMS)
        self._items_left -= count
        if self._items_left < 0:
            raise self.damaged(f"has arrays of more than {_MAX_ALL_ITEMS} items in total")
        return count

    def strings(self, count: int) -> list[str]:
        """Return so many strings; a vocabulary has hundreds of thousands, so they are cut from large pieces."""
        found: list[str] = []
        length_at = _LENGTH.unpack_from
        while len(found) < count:
            piece, used = self._stream.read(_PIECE_BYTES), 0
            for _ in range(count - len(found)):
                start = used + _LENGTH.size
                if start > len(piece):
                    break
                stop = start + length_at(piece, used)[0]
                if stop > len(piece):
                    break
                found.append(self._text(piece[start:stop], self.position + stop))
                used = stop
            self.position += used
            self._stream.seek(self.position)
            if len(found) < count:  # the next one goes beyond the piece, or beyond the file
                found.append(self.string())
        return found

    def pass_strings(self, count: int, sought: Collection[str] = ()) -> tuple[int, dict[str, int]]:
        """Go past so many strings. Return the checksum of their bytes, and the places of the sought strings."""
        left, checksum = count, 0
        length_at = _LENGTH.unpack_from
        spelled = {_LENGTH.pack(len(text.encode())) + text.encode(): text for text in sought}
        places: dict[str, int] = {}
        while left:
            piece, used = self._stream.read(_PIECE_BYTES), 0
            while left and used + _LENGTH.size <= len(piece):
                stop = used + _LENGTH.size + length_at(piece, used)[0]
                if stop > len(piece):
                    break
                if spelled and piece[used:stop] in spelled:
                    places[spelled[piece[used:stop]]] = count - left
                used, left = stop, left - 1
            checksum = zlib.crc32(memoryview(piece)[:used], checksum)
            self.position += used
            self._stream.seek(self.position)
            if left:  # the next one goes beyond the piece, or beyond the file
                text = self.take(self.length(_MAX_STRING))
                spelling = _LENGTH.pack(len(text)) + text
                if spelling in spelled:
                    places[spelled[spelling]] = count - left
                checksum = zlib.crc32(spelling, checksum)
                left -= 1
        return checksum, places

    def _text(self, data: bytes, stop: int) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"has a string that is no UTF-8 before byte {stop}") from error

    def damaged(self, problem: str, tensor: str | None = None) -> CheckpointError:
        return CheckpointError(problem, file=self.file, tensor=tensor, remedy=DOWNLOAD_AGAIN)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata keys."""
    if cursor.size < 24:
        raise cursor.damaged(f"has {cursor.size} bytes, too few for a GGUF file")
    magic = cursor.take(4)
    if magic != _MAGIC:
        refuse_lfs_pointer(magic, cursor.file)
        raise cursor.damaged(f"is no GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
    version = cursor.number("I")
    if version not in _VERSIONS:
        is_big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        raise CheckpointError(
            "is a big-endian GGUF file" if is_big_endian else f"is of GGUF version {version}",
            file=cursor.file,
            remedy="Supported are little-endian files of versions 2 and 3: convert the model again",
        )
    return cursor.number("Q"), cursor.number("Q")


def _read_entries(
    cursor: _Cursor, most_items: int, sought: Mapping[str, Collection[str]] = _NOTHING
) -> tuple[dict[str, Any], list[GGUFTensor]]:
    """Return metadata, with arrays of more than `most_items` as `PassedArray`, and tensors as `_read_tensor` does."""
    num_tensors, num_keys = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string(_MAX_NAME)
        if not key or key in metadata:
            raise cursor.damaged(
                f"has the metadata key {truncated_repr(key)} twice" if key else "has an empty metadata key"
            )
        metadata[key] = _read_value(cursor, cursor.number("I"), key, most_items, sought.get(key, ()))
    check_num_tensors(num_tensors, cursor.file)
    return metadata, [_read_tensor(cursor) for _ in range(num_tensors)]


def _read_value(cursor: _Cursor, kind: int, key: str, most_items: int, sought: Collection[str]) -> Any:
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        return _read_scalars(cursor, kind, 1, key)[0]
    item_kind, count = cursor.number("I"), cursor.num_items()
    if count > most_items and item_kind in (_STRING, *_SCALARS):
        return _pass_items(cursor, item_kind, count, sought)
    if item_kind == _STRING:
        return cursor.strings(count)
    return _read_scalars(cursor, item_kind, count, key)


def _pass_items(cursor: _Cursor, kind: int, count: int, sought: Collection[str]) -> PassedArray:
    """Go past an array's items."""
    if kind == _STRING:
        return PassedArray(kind, count, *cursor.pass_strings(count, sought))
    return PassedArray(kind, count, zlib.crc32(cursor.take(count * struct.calcsize("<" + _SCALARS[kind]))))


def _read_scalars(cursor: _Cursor, kind: int, count: int, key: str) -> list[Any]:
    if kind == _BOOL:
        flags = cursor.take(count)
        if any(flag > 1 for flag in flags):
            raise cursor.damaged(f"has a truth value that is neither 0 nor 1 under {truncated_repr(key)}")
        return [bool(flag) for flag in flags]
    code = _SCALARS.get(kind)
    if code is None:
        raise cursor.damaged(f"has a value of the unknown type {kind} under {truncated_repr(key)}")
    values = struct.unpack(f"<{count}{code}", cursor.take(count * struct.calcsize("<" + code)))
    if code == "f":  # the shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06
        return [float(str(np.float32(value))) for value in values]
    return list(values)


def _read_tensor(cursor: _Cursor) -> GGUFTensor:
    """Read one tensor's entry; `start` counts from the data section's start, which is not known yet."""
    name = cursor.string(_MAX_NAME)
    rank = cursor.number("I")
    if not name or not 1 <= rank <= _MAX_RANK:
        raise cursor.damaged(f"has rank {rank}, where 1 to {_MAX_RANK} is expected" if name else "has no name", name)
    shape = tuple(cursor.number("Q") for _ in range(rank))[::-1]
    kind, start = cursor.number("I"), cursor.number("Q")
    if kind not in SUPPORTED:
        supported = ", ".join(item.name for item in SUPPORTED)
        raise CheckpointError(
            f"is stored as {_type_name(kind)}",
            file=cursor.file,
            tensor=name,
            remedy=f"Supported are {supported}: use a file with these types only",
        )
    quantization = TensorType(kind)
    block_size, block_bytes = BLOCK_SIZES[quantization]
    if 0 in shape or shape[-1] % block_size:
        raise cursor.damaged(f"shape {list(shape)} is impossible in {quantization.name}", name)
    return GGUFTensor(name, shape, quantization, cursor.file, start, math.prod(shape) // block_size * block_bytes)


def _type_name(kind: int) -> str:
    """Return what to call a type that is not supported, and whose it is, where that is known."""
    if kind in set(TensorType):
        return TensorType(kind).name
    if kind in _DROPPED:
        return f"{_DROPPED[kind]}, which llama.cpp dropped in favour of Q4_0 and IQ4_NL"
    return f"unknown type {kind}" + (
        ", perhaps of ik_llama.cpp, whose own types go by such numbers" * (kind >= _IK_TYPES)
    )


def _place(tensor: GGUFTensor, data_start: int, alignment: int, cursor: _Cursor) -> GGUFTensor:
    """Make the tensor's start count from the file's start, and check that its bytes are there."""
    start = data_start + tensor.start
    if tensor.start % alignment:
        raise cursor.damaged(f"starts at byte {tensor.start}, no multiple of {alignment}", tensor.name)
    if start + tensor.num_bytes > cursor.size:
        raise cursor.damaged(
            f"is cut: the tensor ends at byte {start + tensor.num_bytes}, the file has {cursor.size}", tensor.name
        )
    return replace(tensor, start=start)


def _check_layout(tensors: list[GGUFTensor], data_start: int, alignment: int, cursor: _Cursor) -> None:
    """Check that names differ, that bytes do not overlap, and that none follow."""
    names: set[str] = set()
    end = data_start
    for tensor in sorted(tensors, key=lambda item: item.start):
        if tensor.name in names:
            raise cursor.damaged("occurs twice", tensor.name)
        if tensor.start < end:
            raise cursor.damaged("overlaps the tensor before it", tensor.name)
        names.add(tensor.name)
        end = tensor.start + tensor.num_bytes
    if cursor.size > -(-end // alignment) * alignment:
        raise cursor.damaged(f"continues for {cursor.size - end} bytes after its last tensor")
