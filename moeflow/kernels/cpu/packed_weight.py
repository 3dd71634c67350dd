"""Weight matrices in the CPU extension's layout (csrc/formats/formats.h): packed once, then only read.

The extension sees addresses and sizes: here shapes and types are checked, and here memory is kept alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import (
    Array,
    address,
    contiguous,
    dtype_name,
    floats_like,
    is_contiguous,
    is_int64,
    on_host,
    split,
)
from moeflow.kernels.cpu.arguments import describe, floats
from moeflow.kernels.lazy_memory import allocate_lazily
from moeflow.kernels.weight_format import BAND, FORMATS, BlockKind, WeightFormat, block_kind

with suppress(ImportError):  # without it nothing here works; `cpu.why_not` says why
    import moeflow.kernels._cpu as _cpu

_FLOATS: Final = ("float32", "bfloat16", "float16")


class PackedWeight:
    """A weight matrix [rows, cols] in one of the formats.

    Integer weights are multiplied by activations rounded to int8, or to 16 bits if it `is_wide`. That is nearly exact,
    and as fast where memory is the limit. Where VNNI would multiply bytes, it is up to half as fast. Formats
    that files alone have always are.
    """

    __slots__ = ("cols", "format", "handle", "is_wide", "rows", "storage")

    def __init__(
        self, storage: Array, weight_format: WeightFormat, rows: int, cols: int, *, is_wide: bool = False
    ) -> None:
        """Take `storage`, which holds the packed matrix or zeros."""
        self.storage = storage
        self.format = weight_format
        self.rows = rows
        self.cols = cols
        self.is_wide = is_wide
        self.handle: Any = _cpu.PackedMatrix(
            format=weight_format, rows=rows, cols=cols, data=address(storage), is_wide=is_wide
        )

    @classmethod
    def allocate(cls, rows: int, cols: int, weight_format: WeightFormat, *, is_wide: bool = False) -> PackedWeight:
        """Return zeros, to be filled. Raises: MemoryError."""
        storage = allocate_lazily(matrix_bytes(weight_format, rows, cols))
        return cls(storage, weight_format, rows, cols, is_wide=is_wide)

    @classmethod
    def pack(
        cls, weight: Array, weight_format: WeightFormat, order: Array | None = None, *, is_wide: bool = False
    ) -> PackedWeight:
        """Pack a matrix [N, cols] of floats; row i of the result is row `order[i]` of `weight`, None: row i."""
        weight = weight if order is None else weight.index_select(0, order)
        packed = cls.allocate(weight.shape[0], weight.shape[1], weight_format, is_wide=is_wide)
        packed.fill(weight, np.arange(packed.rows))
        return packed

    def fill(
        self,
        source: Array,
        rows: NDArray[np.int64],
        kind: BlockKind | None = None,
        importance: NDArray[np.float32] | None = None,
    ) -> None:
        """Pack `source` as the rows numbered `rows`, in the calling thread; several threads may fill at once.

        Values that the format `keeps` (see `FormatRecord`) do not change. Others are rounded to the nearest step. A
        search for blocks minimizes squared errors, weighted by the `importance` of columns.

        Shapes: source [n, cols] float32, bfloat16 or float16, or with `kind` [n, bytes of a row] uint8;
        rows [n] int64; importance [cols] float32, none below zero; None: columns are alike.
        """
        width = self.cols if kind is None else _cpu.row_bytes(kind, self.cols)
        dtype = dtype_name(source.dtype)
        has_right_type = dtype in _FLOATS if kind is None else dtype == "uint8"
        if not has_right_type or source.shape != (rows.shape[0], width):
            raise ValueError(f"{self} takes rows of {width} {kind or 'floats'}, not {describe(source)}")
        if not is_int64(rows) or rows.ndim != 1:
            raise ValueError(f"rows are numbered by int64, not {describe(rows)}")
        source, rows = contiguous(source), contiguous(rows)
        if FORMATS[self.format].is_searched and kind not in FORMATS[self.format].keeps:
            source, kind = self._blocks(source, kind, importance), block_kind(self.format)
        _cpu.pack_rows(
            weight=self.handle,
            type=kind or dtype,
            source=address(source),
            rows=address(rows),
            num_rows=rows.shape[0],
        )

    def _blocks(self, source: Array, kind: BlockKind | None, importance: NDArray[np.float32] | None) -> Array:
        """Return the blocks that stand for rows best: [n, bytes of a row] uint8."""
        to = block_kind(self.format)
        blocks = cast(Array, np.empty((source.shape[0], _cpu.row_bytes(to, self.cols)), np.uint8))
        _cpu.quantize_rows(
            to=to,
            type=kind or dtype_name(source.dtype),
            source=address(source),
            num_rows=source.shape[0],
            cols=self.cols,
            importance=floats(cast(Array | None, importance), self.cols),
            out=address(blocks),
        )
        return blocks

    def split(self, sizes: Sequence[int]) -> list[PackedRows]:
        """Return parts of so many rows each, one below the other."""
        return [PackedRows(self, rows) for rows in split(np.arange(sum(sizes)), sizes)]

    def take(self, blocks: Sequence[range]) -> PackedWeight:
        """Return the rows of some blocks: as they lie if they are one that begins at a band, else copied.

        Raises: MemoryError.
        """
        num_rows = sum(len(block) for block in blocks)
        if len(blocks) == 1 and blocks[0].start % BAND == 0:
            start = matrix_bytes(self.format, blocks[0].start, self.cols)
            storage = self.storage[start : start + matrix_bytes(self.format, num_rows, self.cols)]
            return PackedWeight(storage, self.format, num_rows, self.cols, is_wide=self.is_wide)
        rows = np.concatenate([np.arange(block.start, block.stop) for block in blocks])
        taken = PackedWeight.allocate(num_rows, self.cols, self.format, is_wide=self.is_wide)
        _cpu.copy_rows(source=self.handle, rows=address(rows), out=taken.handle)
        return taken

    @property
    def nbytes(self) -> int:
        """Bytes of memory, filling included."""
        return self.storage.nbytes

    def unpack(self) -> Array:
        """Return the exact values: [rows, cols] float32."""
        out = floats_like(self.storage, self.rows, self.cols)
        _cpu.unpack_rows(weight=self.handle, rows=0, num_rows=self.rows, out=address(out))
        return out

    def __repr__(self) -> str:
        return f"PackedWeight({self.format}, {self.rows} x {self.cols})"


class PackedStack:
    """Stacked matrices, each in its own format: parts of one matrix of a file."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[PackedWeight]) -> None:
        """Take matrices of as many columns."""
        self.parts = tuple(parts)

    def split(self, sizes: Sequence[int]) -> list[PackedRows]:
        """Return parts of so many rows each, one below the other; none of them is of two matrices."""
        left, found = list(sizes), []
        for part in self.parts:
            own: list[int] = []
            while sum(own) < part.rows:
                own.append(left.pop(0))
            found += part.split(own)
        return found


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Some rows of a packed matrix, which one checkpoint tensor fills, or neighbouring rows of one."""

    weight: PackedWeight
    numbers: NDArray[np.int64]  # [n], where they are in the matrix
    first: int = 0  # the number of their first in the checkpoint's tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.numbers.shape[0], self.weight.cols

    def fill(
        self,
        source: Array,
        rows: NDArray[np.int64],
        kind: BlockKind | None = None,
        importance: NDArray[np.float32] | None = None,
    ) -> None:
        """Pack `source` as those of these rows that `rows` numbers as the tensor does; see `PackedWeight.fill`."""
        self.weight.fill(source, self.numbers[on_host(rows) - self.first], kind, importance)

    def unpack(self) -> Array:
        """Return the exact values: [n, cols] float32."""
        out = floats_like(self.weight.storage, *self.shape)
        _unpack(self.weight, self.numbers, out)
        return out


def unpack_rows(weight: PackedWeight, numbers: Array) -> Array:
    """Return some rows of a packed matrix exactly: an embedding.

    Shapes: numbers [n] int64, all existing -> [n, cols] float32.
    Raises: IndexError.
    """
    out = floats_like(numbers, numbers.shape[0], weight.cols)
    _unpack(weight, numbers, out)
    return out


def _unpack(weight: PackedWeight, numbers: Any, out: Array) -> None:
    """Write some rows to `out`, for any kind of array."""
    if not is_int64(numbers) or numbers.ndim != 1 or not is_contiguous(numbers):
        raise ValueError(f"rows are numbered by contiguous int64, not {describe(numbers)}")
    _cpu.unpack_rows(weight=weight.handle, rows=address(numbers), num_rows=numbers.shape[0], out=address(out))


def matrix_bytes(weight_format: WeightFormat, rows: int, cols: int) -> int:
    """Return what a packed matrix [rows, cols] takes."""
    num_bytes: int = _cpu.matrix_bytes(weight_format, rows, cols)
    return num_bytes


def whole_bands(rows: int) -> int:
    """Return so many rows filled up to whole bands."""
    return -(-rows // BAND) * BAND
