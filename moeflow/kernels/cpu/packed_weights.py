"""Weights in the order in which the CPU extension reads them (csrc/formats.h): packed once, then only read.

The extension sees addresses and sizes: here shapes and types are checked, and here memory is kept alive.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.activation import Activation, kernel_arguments
from moeflow.kernels.arrays import (
    Array,
    address,
    contiguous,
    dtype_name,
    floats_like,
    is_contiguous,
    on_host,
    split,
    stack,
)
from moeflow.kernels.cpu.arguments import check_floats, check_ids, describe
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.lazy_memory import allocate_lazily
from moeflow.kernels.weight_format import BAND, FORMATS, BlockKind, WeightFormat, block_kind

with suppress(ImportError):  # without it nothing here works; `cpu.why_not` says why
    import moeflow.kernels._cpu as _cpu

_FLOATS: Final = ("float32", "bfloat16", "float16")


class PackedWeight:
    """A weight matrix [rows, cols] in one of the formats.

    Integer weights meet activations that are rounded to int8, or to 16 bits if it `is_wide`: that is next to exact, as
    fast where memory is what takes the time, and up to half as fast where VNNI would have multiplied bytes. Formats
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

        What the format `keeps` (see `FormatRecord`) does not change; all else is rounded to the nearest step, or, if
        blocks are searched for, so that squared errors, each times the `importance` of its column, are small.

        Shapes: source [n, cols] float32, bfloat16 or float16, or with `kind` [n, bytes of a row] uint8;
        rows [n] int64; importance [cols] float32, none below zero; None: columns are alike.
        """
        width = self.cols if kind is None else _cpu.row_bytes(kind, self.cols)
        dtype = dtype_name(source.dtype)
        has_right_type = dtype in _FLOATS if kind is None else dtype == "uint8"
        if not has_right_type or source.shape != (rows.shape[0], width):
            raise ValueError(f"{self} takes rows of {width} {kind or 'floats'}, not {describe(source)}")
        if dtype_name(rows.dtype) != "int64" or rows.ndim != 1:
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
        if importance is not None:
            check_floats(cast(Array, importance), (self.cols,))
        to = block_kind(self.format)
        blocks = cast(Array, np.empty((source.shape[0], _cpu.row_bytes(to, self.cols)), np.uint8))
        _cpu.quantize_rows(
            to=to,
            type=kind or dtype_name(source.dtype),
            source=address(source),
            num_rows=source.shape[0],
            cols=self.cols,
            importance=address(importance),
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
    """Matrices one below the other, each in a format of its own: parts of one, as a file has them."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[PackedWeight]) -> None:
        """Take matrices of as many columns."""
        self.parts = tuple(parts)

    @property
    def rows(self) -> int:
        """Those of all together."""
        return sum(part.rows for part in self.parts)

    @property
    def cols(self) -> int:
        """Those of each."""
        return self.parts[0].cols

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


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """What experts compute, beside their matrices."""

    function: Activation = "silu"
    is_gated: bool = True

    @property
    def num_matrices(self) -> int:
        """Gate, up and down, or without a gate up and down."""
        return self.num_ups + 1

    @property
    def num_ups(self) -> int:
        """Those before down."""
        return 2 if self.is_gated else 1


SWIGLU: Final = ExpertKind()  # of nearly all models


class PackedExperts:
    """The experts of a layer, each one's gate, up and down matrices side by side in memory.

    That is `down(function(gate(x)) * up(x))`, or with two matrices `down(function(up(x)))`.
    """

    __slots__ = (
        "biases",
        "down",
        "down_format",
        "format",
        "function",
        "gate_up",
        "handle",
        "hidden",
        "is_gated",
        "is_wide",
        "kind",
        "storage",
        "width",
    )

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        width: int,
        weight_format: WeightFormat,
        *,
        down_format: WeightFormat | None = None,
        kind: ExpertKind = SWIGLU,
        is_wide: bool = False,
        storage: Any = None,
    ) -> None:
        """Take `storage` [E, `expert_bytes` or more] uint8, whose rows hold an expert each, or allocate zeros.

        Rows may lie anywhere. Zeros are to be filled through `parts`. `down_format` is for files that
        have down matrices otherwise than gates and ups. `is_wide` as in `PackedWeight`.
        Raises: MemoryError.
        """
        self.biases: ExpertBiases | None = None
        self.format = weight_format
        self.down_format = down_format or weight_format
        self.is_wide = is_wide
        self.hidden = hidden
        self.width = width
        self.kind = kind
        self.function = kind.function
        self.is_gated = kind.is_gated
        # With a gate, bands in turn: gate 0..15, up 0..15, gate 16..31, ...
        up_rows = (2 if kind.is_gated else 1) * whole_bands(width)
        up_bytes = matrix_bytes(weight_format, up_rows, hidden)
        num_bytes = up_bytes + matrix_bytes(self.down_format, hidden, width)
        if storage is None:
            storage = allocate_lazily(num_experts * num_bytes).view(num_experts, num_bytes)
        if len(storage) != num_experts or not all(_holds(row, num_bytes) for row in storage):
            rows = ", ".join(describe(row) for row in storage[:1])
            raise ValueError(f"{num_experts} experts of {num_bytes} bytes do not fit into {len(storage)} rows: {rows}")
        self.storage = storage
        self.gate_up = [
            PackedWeight(row[:up_bytes], weight_format, up_rows, hidden, is_wide=is_wide) for row in storage
        ]
        self.down = [
            PackedWeight(row[up_bytes:num_bytes], self.down_format, hidden, width, is_wide=is_wide) for row in storage
        ]
        self.handle: Any = _cpu.PackedExperts(
            up_format=weight_format,
            down_format=self.down_format,
            hidden=hidden,
            width=width,
            up=[address(weight.storage) for weight in self.gate_up],
            down=[address(weight.storage) for weight in self.down],
            is_gated=kind.is_gated,
            biases=None,
            is_wide=is_wide,
            **kernel_arguments(kind.function),
        )

    @classmethod
    def pack(
        cls,
        gate_up: Array,
        down: Array,
        weight_format: WeightFormat,
        *,
        function: Activation = "silu",
        biases: ExpertBiases | None = None,
        is_wide: bool = False,
    ) -> PackedExperts:
        """Pack all experts of a layer.

        Shapes: gate_up [E, 2I, H] (gate rows first) or without a gate [E, I, H], down [E, H, I]; float32, bfloat16 or
        float16.
        """
        num_experts, hidden, width = down.shape
        is_gated = gate_up.shape[1] != width
        if gate_up.shape != (num_experts, (2 if is_gated else 1) * width, hidden):
            raise ValueError(f"experts do not fit together: {describe(gate_up)} and {describe(down)}")
        kind = ExpertKind(function, is_gated)
        packed = cls(num_experts, hidden, width, weight_format, kind=kind, is_wide=is_wide)
        for parts, up, back in zip(packed.parts(), gate_up, down, strict=True):
            for part, source in zip(parts, (*split(up, [width] * kind.num_ups), back), strict=True):
                part.fill(source, np.arange(source.shape[0]))
        return packed.with_biases(biases)

    def with_biases(self, biases: ExpertBiases | None) -> PackedExperts:
        """Return these experts with biases; None: as they are. Raises: ValueError if these are of other experts."""
        if biases is None:
            return self
        shapes = [(self.num_experts, size) for size in (self.kind.num_ups * self.width, self.hidden)]
        if [each.shape for each in biases] != shapes:
            raise ValueError(f"{self} does not take the biases {describe(biases.up)} and {describe(biases.down)}")
        experts = copy.copy(self)
        experts.biases = biases
        experts.handle = self.in_slots(0, self.num_experts, biases)
        return experts

    def at(self, rows: Sequence[Array]) -> PackedExperts:
        """Return these experts as they lie, or will lie, in other rows of memory."""
        return PackedExperts(
            self.num_experts,
            self.hidden,
            self.width,
            self.format,
            down_format=self.down_format,
            kind=self.kind,
            is_wide=self.is_wide,
            storage=rows,
        ).with_biases(self.biases)

    def in_slots(self, slots_address: int, num_experts: int, biases: ExpertBiases | None) -> Any:
        """Return, for kernels, a layer of so many experts whose places among these are at an address: [E] int32.

        At 0: they are in order. The biases are those of that layer. All memory has to be kept alive.
        """
        own = None if biases is None else biases.handle(self.kind.num_ups)
        return self.handle.in_slots(slots=slots_address, num_experts=num_experts, biases=own)

    def movable(self) -> PackedExperts:
        """Return these experts: their rows of memory may be copied elsewhere and computed with there."""
        return self

    def for_kernels(self) -> tuple[PackedExperts, None, ExpertBiases | None]:
        """Return these experts, which are in order, and their biases."""
        return self, None, self.biases

    def compute(self, x: Array, topk_ids: Array, topk_weights: Array, residual: Array | None = None) -> Array:
        """Return `residual` plus the weighted sum of each token's experts.

        A token's experts are added in ascending order of their numbers, each of which must exist.

        Shapes: x and residual [T, hidden] float32, topk_ids [T, K] int64, topk_weights [T, K] float32 -> [T, hidden].
        """
        num_tokens, top_k = topk_ids.shape
        check_floats(x, (num_tokens, self.hidden))
        check_floats(topk_weights, (num_tokens, top_k))
        check_ids(topk_ids)
        if residual is not None:
            check_floats(residual, (num_tokens, self.hidden))
        out = floats_like(x, num_tokens, self.hidden)
        _cpu.experts(
            layer=self.handle,
            x=address(x),
            num_tokens=num_tokens,
            top_k=top_k,
            topk_ids=address(topk_ids),
            topk_weights=address(topk_weights),
            residual=address(residual),
            out=address(out),
        )
        return out

    def parts(self) -> list[tuple[PackedRows, ...]]:
        """Return each expert's gate [I, H] if it has one, up [I, H] and down [H, I]."""
        unit_rows, outputs = self._unit_rows(), np.arange(self.hidden)
        return [
            (*(PackedRows(gate_up, rows) for rows in unit_rows), PackedRows(down, outputs))
            for gate_up, down in zip(self.gate_up, self.down, strict=True)
        ]

    def _unit_rows(self) -> list[NDArray[np.int64]]:
        """Return the rows of `gate_up` that are the gate's, if there is one, and those that are up's."""
        return gate_and_up_rows(self.width) if self.is_gated else [np.arange(self.width)]

    @property
    def num_experts(self) -> int:
        """How many there are."""
        return len(self.gate_up)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, filling included."""
        return sum(row.nbytes for row in self.storage)

    def unpack(self) -> tuple[Array, Array]:
        """Return the exact values: gate_up [E, 2I, H] (gate rows first) or [E, I, H], and down [E, H, I], float32."""
        parts = self.parts()
        gate_up = stack([stack([part.unpack() for part in ups]).reshape(-1, self.hidden) for *ups, _ in parts])
        return gate_up, stack([down.unpack() for *_, down in parts])

    def __repr__(self) -> str:
        return f"PackedExperts({self.format}, {self.num_experts} of {self.hidden} x {self.width})"


def unpack_rows(weight: PackedWeight, numbers: Array) -> Array:
    """Return some rows of a packed matrix exactly: an embedding.

    Shapes: numbers [n] int64, each of which must exist -> [n, cols] float32.
    Raises: IndexError.
    """
    out = floats_like(numbers, numbers.shape[0], weight.cols)
    _unpack(weight, numbers, out)
    return out


def _unpack(weight: PackedWeight, numbers: Any, out: Array) -> None:
    """Write some rows to `out`, of whichever kind of array either is."""
    if dtype_name(numbers.dtype) != "int64" or numbers.ndim != 1 or not is_contiguous(numbers):
        raise ValueError(f"rows are numbered by contiguous int64, not {describe(numbers)}")
    _cpu.unpack_rows(weight=weight.handle, rows=address(numbers), num_rows=numbers.shape[0], out=address(out))


def gate_and_up_rows(width: int) -> list[NDArray[np.int64]]:
    """Return where the gate's and up's rows of so many units lie: bands in turn, gate 0..15, up 0..15, gate 16..31."""
    units = np.arange(width)
    gate = units + units // BAND * BAND
    return [gate, gate + BAND]


def matrix_bytes(weight_format: WeightFormat, rows: int, cols: int) -> int:
    """Return what a packed matrix [rows, cols] takes."""
    num_bytes: int = _cpu.matrix_bytes(weight_format, rows, cols)
    return num_bytes


def expert_bytes(
    hidden: int,
    width: int,
    weight_format: WeightFormat,
    *,
    down_format: WeightFormat | None = None,
    is_gated: bool = True,
) -> int:
    """Return what an expert takes in a row of `PackedExperts.storage`."""
    up_bytes = matrix_bytes(weight_format, (2 if is_gated else 1) * whole_bands(width), hidden)
    return up_bytes + matrix_bytes(down_format or weight_format, hidden, width)


def whole_bands(rows: int) -> int:
    """Return so many rows filled up to whole bands."""
    return -(-rows // BAND) * BAND


def _holds(row: Array, num_bytes: int) -> bool:
    return dtype_name(row.dtype) == "uint8" and row.ndim == 1 and row.nbytes >= num_bytes and is_contiguous(row)
