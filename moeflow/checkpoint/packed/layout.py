"""Packed weights: a model's weights in the layout that kernels read, so that a read, or a mapping, is all it takes.

    page 0          magic, length and checksum of the description, the description (JSON)
    from page 1     table: for each part, checksum and mark (4 bytes each); the table's own checksum ends its last page
    then            the slabs, one an expert, in the order (layer, expert), each filled up to whole pages
    then            all other weights, each from the start of a page, in the order in which a model takes up memory

Slabs of a layer have one size, so their places can be computed. Layers with other formats may have other sizes, and a
slot of a cache holds the largest. The other weights are checked in pieces of one size. Slabs and pieces
are the file's parts, numbered in its order; the contents of a part are not known here. Checksums are CRC-32, which
ISA-L
computes at 30 GB/s (zlib: 6), so that a first read hardly takes longer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec
from isal import isal_zlib

from moeflow.checkpoint.packed.file_io import PAGE_BYTES, whole_pages
from moeflow.core.errors import CheckpointError
from moeflow.core.units import MIB

FORMAT_VERSION: Final = 2  # raise it, too, if kernels change the layout of packed weights (csrc/formats/formats.h)
PIECE_BYTES: Final = 4 * MIB  # of the weights outside of slabs
PACK_AGAIN: Final = "Pack the model again (`moeflow pack`), or delete the file"

_MAGIC: Final = b"MOESLAB\n"
_PREFIX: Final = struct.Struct("<8sII")  # magic, bytes of the description, its checksum
_ENTRY: Final = struct.Struct("<II")  # a part's checksum, its mark
_CHECKSUM: Final = struct.Struct("<I")


class SlabSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What packed weights holds; two files with equal specs are interchangeable, see also `fits`."""

    identity: str  # of the checkpoint it was made from
    weight_format: str
    embedding_format: str
    num_layers: int  # those with experts
    num_experts: int  # of a layer
    slab_bytes: int  # of one expert where it takes most, without the filling
    resident_bytes: int  # of all other weights: whole pages
    layout: str  # a hash over which of these is where
    expert_formats: tuple[tuple[str, str], ...] = ()  # of each such layer's ups and downs; empty: all `weight_format`
    slab_bytes_of_layers: tuple[int, ...] = ()  # of an expert of each such layer; empty: all `slab_bytes`
    is_weighted: bool = False  # whether weights were rounded by the importance of the inputs that they meet
    format_version: int = FORMAT_VERSION

    def fits(self, wanted: SlabSpec) -> bool:
        """Return whether a file with this spec will do where `wanted` is asked for: however well it was rounded."""
        return msgspec.structs.replace(self, is_weighted=wanted.is_weighted) == wanted

    def has_experts_of(self, wanted: SlabSpec) -> bool:
        """Return whether a file with this spec has the experts of `wanted`, whatever its other weights are."""
        return self._experts == wanted._experts

    @property
    def _experts(self) -> tuple[object, ...]:
        same = ((self.weight_format, self.weight_format),) * self.num_layers
        formats = self.expert_formats or same
        return (self.format_version, self.identity, self.num_experts, formats, self.layer_bytes)

    @property
    def num_slabs(self) -> int:
        """Slabs of the file."""
        return self.num_layers * self.num_experts

    @property
    def num_parts(self) -> int:
        """Slabs, and pieces of the other weights."""
        return self.num_slabs + -(-self.resident_bytes // PIECE_BYTES)

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Of an expert of each layer, without the filling."""
        return self.slab_bytes_of_layers or (self.slab_bytes,) * self.num_layers

    @property
    def mean_slab_bytes(self) -> int:
        """Of an expert, over all layers."""
        return self._sum_of_layers(self.slab_bytes, self.slab_bytes_of_layers) // max(self.num_layers, 1)

    @property
    def layer_starts(self) -> tuple[int, ...]:
        """Where each layer's slabs begin in the file."""
        strides = map(whole_pages, self.layer_bytes[:-1])
        return tuple(accumulate((it * self.num_experts for it in strides), initial=PAGE_BYTES + self.table_bytes))

    def stride_bytes(self, layer: int) -> int:
        """From one slab of a layer to the next: whole pages."""
        return whole_pages(self.layer_bytes[layer])

    @property
    def table_bytes(self) -> int:
        """Pages of the table."""
        return whole_pages(self.num_parts * _ENTRY.size + _CHECKSUM.size)

    @property
    def resident_start(self) -> int:
        """Where the weights outside of slabs begin in the file."""
        strides = self._sum_of_layers(whole_pages(self.slab_bytes), map(whole_pages, self.slab_bytes_of_layers))
        return PAGE_BYTES + self.table_bytes + self.num_experts * strides

    @property
    def content_bytes(self) -> int:
        """Of all parts, without the filling."""
        slabs_bytes = self.num_experts * self._sum_of_layers(self.slab_bytes, self.slab_bytes_of_layers)
        return slabs_bytes + self.resident_bytes

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self.resident_start + self.resident_bytes

    def _sum_of_layers(self, usual: int, own: Iterable[int]) -> int:
        """Return each layer's value, its own or the default. The number of layers is bounded in case of a damaged
        file."""
        return sum(own) if self.slab_bytes_of_layers else self.num_layers * usual

    def number(self, layer: int, expert: int) -> int:
        """Return a slab's place in the order of the file. Raises: IndexError."""
        if not (0 <= layer < self.num_layers and 0 <= expert < self.num_experts):
            raise IndexError(f"layer {layer}, expert {expert} of {self.num_layers} layers of {self.num_experts}")
        return layer * self.num_experts + expert

    def offset(self, number: int) -> int:
        """Return where a part starts in the file."""
        if number >= self.num_slabs:
            return self.resident_start + (number - self.num_slabs) * PIECE_BYTES
        layer, expert = divmod(number, self.num_experts)
        return self.layer_starts[layer] + expert * self.stride_bytes(layer)

    def part_bytes(self, number: int) -> int:
        """Return how long a part is, without the filling."""
        if number < self.num_slabs:
            return self.layer_bytes[number // self.num_experts]
        return min(PIECE_BYTES, self.resident_bytes - (number - self.num_slabs) * PIECE_BYTES)

    def name(self, number: int) -> str:
        """Name a part as messages do."""
        if number >= self.num_slabs:
            return f"weights outside of experts, piece {number - self.num_slabs}"
        layer, expert = divmod(number, self.num_experts)
        return f"layer {layer}, expert {expert}"


class SlabIndex(msgspec.Struct, frozen=True):
    """A finished packed weights file, as its first pages describe it."""

    path: Path
    spec: SlabSpec
    checksums: tuple[int, ...]  # CRC-32 of each part, without the filling


def checksum(content: memoryview | bytes) -> int:
    """Return the CRC-32 of a part."""
    return isal_zlib.crc32(content)


def encode_header(spec: SlabSpec) -> bytes:
    """Return page 0."""
    text = msgspec.json.encode(spec)
    return (_PREFIX.pack(_MAGIC, len(text), isal_zlib.crc32(text)) + text).ljust(PAGE_BYTES, b"\0")


def encode_entry(number: int, part_checksum: int) -> bytes:
    """Return a table entry. Its mark shows that the part is written, and cannot occur by chance."""
    return _ENTRY.pack(part_checksum, isal_zlib.crc32(_ENTRY.pack(part_checksum, number)))


def entry_offset(number: int) -> int:
    """Return where a part's table entry starts in the file."""
    return PAGE_BYTES + number * _ENTRY.size


def decode_entries(table: bytes, spec: SlabSpec) -> list[int | None]:
    """Return each part's checksum, None if its entry is not a valid one."""
    entries = _ENTRY.iter_unpack(table[: spec.num_parts * _ENTRY.size])
    return [
        part_checksum if encode_entry(number, part_checksum) == _ENTRY.pack(part_checksum, mark) else None
        for number, (part_checksum, mark) in enumerate(entries)
    ]


def encode_table(checksums: Sequence[int], spec: SlabSpec) -> bytes:
    """Return the table of a finished file."""
    entries = b"".join(encode_entry(number, value) for number, value in enumerate(checksums))
    body = entries.ljust(spec.table_bytes - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(isal_zlib.crc32(body))


def read_slab_index(path: Path) -> SlabIndex:
    """Read what packed weights holds. No part is read: those are checked when they are.

    Raises: CheckpointError if the file cannot be read, is no packed weights file, of another version, cut or damaged.
    """
    try:
        with path.open("rb") as stream:
            spec = decode_header(stream.read(PAGE_BYTES), path)
            actual_bytes = stream.seek(0, 2)
            stream.seek(PAGE_BYTES)
            table = stream.read(min(spec.table_bytes, actual_bytes))
    except OSError as error:
        remedy = "Check that the file is there and that you may read it"
        raise CheckpointError(f"cannot be read ({error.strerror or error})", file=path, remedy=remedy) from error
    if actual_bytes != spec.file_bytes:
        raise CheckpointError(
            f"is {actual_bytes} bytes long instead of {spec.file_bytes}: it was cut or is another file",
            file=path,
            remedy=PACK_AGAIN,
        )
    body, stored = table[: -_CHECKSUM.size], table[-_CHECKSUM.size :]
    if _CHECKSUM.pack(isal_zlib.crc32(body)) != stored:
        raise CheckpointError("has a damaged table of its parts", file=path, remedy=PACK_AGAIN)
    checksums = decode_entries(body, spec)
    damaged = [spec.name(number) for number, value in enumerate(checksums) if value is None]
    if damaged:
        raise CheckpointError(f"lacks {len(damaged)} parts, {damaged[0]} first", file=path, remedy=PACK_AGAIN)
    return SlabIndex(path, spec, tuple(value for value in checksums if value is not None))


def decode_header(page: bytes, path: Path) -> SlabSpec:
    """Return what page 0 says. Raises: CheckpointError."""
    if len(page) < PAGE_BYTES or not page.startswith(_MAGIC):
        raise CheckpointError("is no file of packed weights", file=path, remedy="Name a file that moeflow made")
    _, length, expected = _PREFIX.unpack_from(page)
    text = page[_PREFIX.size : _PREFIX.size + length]
    if len(text) != length or isal_zlib.crc32(text) != expected:
        raise CheckpointError("has a damaged description", file=path, remedy=PACK_AGAIN)
    try:
        version = msgspec.json.decode(text, type=dict[str, object]).get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"is of format version {version}; this moeflow reads version {FORMAT_VERSION}",
                file=path,
                remedy=PACK_AGAIN,
            )
        spec = msgspec.json.decode(text, type=SlabSpec)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(
            f"has a description that makes no sense ({error})", file=path, remedy=PACK_AGAIN
        ) from error
    if not _makes_sense(spec):
        raise CheckpointError("describes weights that cannot be", file=path, remedy=PACK_AGAIN)
    return spec


def _makes_sense(spec: SlabSpec) -> bool:
    """Return whether sizes are possible; a dense model has no slabs."""
    counts = (spec.num_layers, spec.num_experts, spec.slab_bytes)
    sizes = spec.slab_bytes_of_layers
    are_possible = not sizes or (len(sizes) == spec.num_layers and min(sizes) > 0 and max(sizes) == spec.slab_bytes)
    has_slabs = min(counts) > 0 and are_possible
    is_dense = counts == (0, 0, 0) and spec.resident_bytes > 0
    return (has_slabs or is_dense) and spec.resident_bytes >= 0 and spec.resident_bytes % PAGE_BYTES == 0


def is_packed_weights_file(path: Path) -> bool:
    """Return whether a file was written here, in whatever version and state. Raises: OSError."""
    with path.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC
