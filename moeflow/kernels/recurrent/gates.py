"""Gates of what mixes tokens: beside a norm, or of attention's result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.cpu import recurrent as cpu
from moeflow.kernels.norm import rms_norm
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels.triton import gates as triton_gates


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, is_gated_first: bool) -> Tensor:
    """Return `norm(x) * weight * silu(gate)`, or gated first, `norm(x * silu(gate)) * weight`.

    Norms are over groups of neighbouring values. Shapes: x and gate [T, G * D], gate perhaps a part of longer rows;
    weight [G, D], or [1, D] for all groups -> [T, G * D].
    """
    if cpu.accepts(x) and cpu.accepts(gate) and cpu.accepts(weight):
        return cpu.gated_norm(x, gate, weight, eps, is_gated_first=is_gated_first)
    if launching.accepts(x):
        return triton_gates.gated_norm(x, gate, weight, eps, is_gated_first=is_gated_first)
    shape = (x.shape[0], -1, weight.shape[1])
    share = torch.nn.functional.silu(gate.float()).reshape(shape)
    wide = x.float().reshape(shape)
    normed = (
        rms_norm(wide * share if is_gated_first else wide, wide.new_ones(weight.shape[1]), eps).to(x.dtype) * weight
    )
    return (normed if is_gated_first else normed * share).to(x.dtype).flatten(1)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x * sigmoid(gate)`. Shapes: x and gate [T, D], gate perhaps a part of longer rows -> [T, D]."""
    if cpu.accepts(x) and cpu.accepts(gate):
        return cpu.sigmoid_gate(x, gate)
    if launching.accepts(x):
        return triton_gates.sigmoid_gate(x, gate)
    return x * torch.sigmoid(gate)
