"""The experts of a layer, packed: their layout, size and computation.

A matrix is a `PackedWeight`; here it is known which of an expert's lie side by side, and in what order.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.activation import Activation, kernel_arguments
from moeflow.kernels.arrays import Array, address, dtype_name, floats_like, is_contiguous, split, stack
from moeflow.kernels.cpu.arguments import describe, floats, ids
from moeflow.kernels.cpu.packed_weight import PackedRows, PackedWeight, matrix_bytes, whole_bands
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.lazy_memory import allocate_lazily
from moeflow.kernels.weight_format import BAND, WeightFormat

with suppress(ImportError):  # without it nothing here works; `cpu.why_not` says why
    import moeflow.kernels._cpu as _cpu


class ExpertKind(msgspec.Struct, frozen=True):
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
        "gate_up",
        "handle",
        "hidden",
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
        # With a gate, bands alternate: gate 0..15, up 0..15, gate 16..31, ...
        up_rows = kind.num_ups * whole_bands(width)
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
            raise ValueError(f"experts do not match: {describe(gate_up)} and {describe(down)}")
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

        A token's experts are added in ascending order of their numbers. Each number must exist.

        Shapes: x and residual [T, hidden] float32, topk_ids [T, K] int64, topk_weights [T, K] float32 -> [T, hidden].
        """
        return sum_experts(self.handle, self.hidden, x, topk_ids, topk_weights, residual)

    def parts(self) -> list[tuple[PackedRows, ...]]:
        """Return each expert's gate [I, H] if it has one, up [I, H] and down [H, I]."""
        rows_of_ups, outputs = unit_rows(self.width, self.kind.num_ups), np.arange(self.hidden)
        return [
            (*(PackedRows(gate_up, rows) for rows in rows_of_ups), PackedRows(down, outputs))
            for gate_up, down in zip(self.gate_up, self.down, strict=True)
        ]

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


def sum_experts(
    layer: Any, hidden: int, x: Array, topk_ids: Array, topk_weights: Array, residual: Array | None
) -> Array:
    """Do what `PackedExperts.compute` says with a layer as kernels see it, see `PackedExperts.in_slots`."""
    num_tokens, top_k = topk_ids.shape
    out = floats_like(x, num_tokens, hidden)
    _cpu.experts(
        layer=layer,
        x=floats(x, num_tokens, hidden),
        num_tokens=num_tokens,
        top_k=top_k,
        topk_ids=ids(topk_ids),
        topk_weights=floats(topk_weights, num_tokens, top_k),
        residual=floats(residual, num_tokens, hidden),
        out=address(out),
    )
    return out


def unit_rows(width: int, num_ups: int) -> list[NDArray[np.int64]]:
    """Return the places of gate's rows, if there is a gate, and up's for this number of units: see `PackedExperts`."""
    units = np.arange(width)
    return [units + (units // BAND * (num_ups - 1) + number) * BAND for number in range(num_ups)]


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


def _holds(row: Array, num_bytes: int) -> bool:
    return dtype_name(row.dtype) == "uint8" and row.ndim == 1 and row.nbytes >= num_bytes and is_contiguous(row)
