"""This process's slices of a layer's experts: some hidden units of every expert, and some outputs.

Every unit is made of the whole input, and every output of all units, which processes exchange in between. So no sum is
cut, and side by side the results are those of `PackedExperts.compute`, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moeflow.kernels.activation import kernel_arguments
from moeflow.kernels.arrays import Array, address
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import floats, ids
from moeflow.kernels.cpu.packed_experts import ExpertKind, expert_bytes, unit_rows
from moeflow.kernels.cpu.packed_weight import PackedRows, PackedWeight, matrix_bytes, whole_bands
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.on_demand import torch
from moeflow.kernels.weight_format import WeightFormat

if extension.is_available():
    import moeflow.kernels._cpu as _cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceShape:
    """What a process has of each expert. Both ranges begin at a band of outputs, and may be empty."""

    hidden: int  # of the whole layer
    width: int  # likewise, the units of an expert
    units: range
    outputs: range
    up_format: WeightFormat  # of gate and up
    down_format: WeightFormat
    num_ups: int = 2  # matrices that units come of: gate and up, or up alone

    @property
    def up_rows(self) -> int:
        """Rows of the gate and up, filled up to whole bands."""
        return self.num_ups * whole_bands(len(self.units))

    @property
    def up_bytes(self) -> int:
        """Bytes of the gate's and up's rows."""
        return matrix_bytes(self.up_format, self.up_rows, self.hidden)

    @property
    def down_bytes(self) -> int:
        """Bytes of the down's rows."""
        return matrix_bytes(self.down_format, len(self.outputs), self.width)

    @property
    def whole_bytes(self) -> int:
        """Bytes of a whole expert."""
        down, is_gated = self.down_format, self.num_ups == 2
        return expert_bytes(self.hidden, self.width, self.up_format, down_format=down, is_gated=is_gated)

    def starts_in_whole(self) -> tuple[int, int]:
        """Return where in a whole expert's memory the slice's gate and up begin, and where its down does."""
        up = matrix_bytes(self.up_format, self.num_ups * self.units.start, self.hidden)
        down = self.whole_bytes - matrix_bytes(self.down_format, self.hidden, self.width)
        return up, down + matrix_bytes(self.down_format, self.outputs.start, self.width)


class PackedExpertSlices:
    """Slices of the experts of one layer."""

    def __init__(
        self,
        shape: SliceShape,
        storage: Array,
        *,
        kind: ExpertKind,
        biases: ExpertBiases | None,
        is_wide: bool,
        is_whole: bool,
    ) -> None:
        """Take `storage` [E, bytes] uint8, whose rows hold a slice each, or, if it `is_whole`, a whole expert."""
        assert kind.num_ups == shape.num_ups
        self.shape = shape
        self._biases = biases  # of whole experts; kept for the kernels
        up_bytes, down_bytes = shape.up_bytes, shape.down_bytes
        up_start, down_start = shape.starts_in_whole() if is_whole else (0, up_bytes)
        ups = [row[up_start : up_start + up_bytes] for row in storage]
        downs = [row[down_start : down_start + down_bytes] for row in storage]
        up_rows, num_outputs = shape.up_rows, len(shape.outputs)
        self._up = [PackedWeight(it, shape.up_format, up_rows, shape.hidden, is_wide=is_wide) for it in ups]
        self._down = [PackedWeight(it, shape.down_format, num_outputs, shape.width, is_wide=is_wide) for it in downs]
        own = None if biases is None else biases.handle(kind.num_ups, shape.units.start, shape.outputs.start)
        half = partial(_half, shape, kind=kind, biases=own, is_wide=is_wide)
        self._units = half(self._up, [], hidden=shape.hidden, width=len(shape.units))
        self._outputs = half([], self._down, hidden=num_outputs, width=shape.width)

    def units(self, x: Array, topk_ids: Array) -> Array:
        """Return this slice's hidden units of all pairs (token, k), in ascending order of expert, then of token.

        Shapes: x [T, hidden] float32, topk_ids [T, K] int64 -> [T * K, own units].
        """
        num_tokens, top_k = topk_ids.shape
        out = torch.empty(num_tokens * top_k, whole_bands(len(self.shape.units)))
        _cpu.expert_units(
            layer=self._units,
            x=floats(x, num_tokens, self.shape.hidden),
            num_tokens=num_tokens,
            top_k=top_k,
            topk_ids=ids(topk_ids),
            out=address(out),
        )
        return out[:, : len(self.shape.units)]

    def sums(self, units: Array, topk_ids: Array, topk_weights: Array, residual: Array | None) -> Array:
        """Return this slice's outputs of the weighted sum of each token's experts, plus those of the residual.

        Shapes: units [T * K, width], in the order of `units`; topk_ids and topk_weights [T, K], residual [T, own
        outputs] -> [T, own outputs].
        """
        num_tokens, top_k = topk_ids.shape
        out = torch.empty(num_tokens, len(self.shape.outputs))
        _cpu.expert_sums(
            layer=self._outputs,
            x=floats(units, num_tokens * top_k, self.shape.width),
            num_tokens=num_tokens,
            top_k=top_k,
            topk_ids=ids(topk_ids),
            topk_weights=floats(topk_weights, num_tokens, top_k),
            residual=floats(residual, *out.shape),
            out=address(out),
        )
        return out

    def parts(self) -> list[tuple[PackedRows, ...]]:
        """Return the slice's rows of each expert's gate [I, H], if it has one, up [I, H] and down [H, I]."""
        ups = unit_rows(len(self.shape.units), self.shape.num_ups)
        outputs = np.arange(len(self.shape.outputs))
        first_unit, first_output = self.shape.units.start, self.shape.outputs.start
        return [
            (*(PackedRows(gate_up, rows, first_unit) for rows in ups), PackedRows(down, outputs, first_output))
            for gate_up, down in zip(self._up, self._down, strict=True)
        ]


def _half(
    shape: SliceShape,
    up: list[PackedWeight],
    down: list[PackedWeight],
    *,
    hidden: int,
    width: int,
    kind: ExpertKind,
    biases: Any,
    is_wide: bool,
) -> Any:
    """Return a layer of `up` or `down` matrices only, for the extension."""
    return _cpu.PackedExperts(
        up_format=shape.up_format,
        down_format=shape.down_format,
        hidden=hidden,
        width=width,
        up=[address(weight.storage) for weight in up],
        down=[address(weight.storage) for weight in down],
        is_gated=kind.is_gated,
        biases=biases,
        is_wide=is_wide,
        **kernel_arguments(kind.function),
    )
