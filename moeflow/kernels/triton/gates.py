"""Gates of the results of token mixers. The reference is `kernels/recurrent/gates.py`.

Memory bounds both: a program reads a group or a block of a row once, and writes as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.activation import activation
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK: Final = 1024


@triton.jit
def gated_norm_kernel(
    x_ptr,
    x_stride,
    gate_ptr,
    gate_stride,
    weight_ptr,
    weight_stride,
    out_ptr,
    eps,
    size: tl.constexpr,
    is_gated_first: tl.constexpr,
    block: tl.constexpr,
):
    """Normalise and gate group `program_id(1)` of row `program_id(0)`.

    Shapes: x and gate [T, G * size], rows `x_stride` and `gate_stride` apart. Weight [G, size], rows `weight_stride`
    apart. Out [T, G * size].
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, block)
    is_inside = columns < size
    at = group * size + columns
    x = tl.load(x_ptr + row * x_stride + at, mask=is_inside, other=0.0)
    share = activation(tl.load(gate_ptr + row * gate_stride + at, mask=is_inside, other=0.0).to(tl.float32), "silu")
    weight = tl.load(weight_ptr + group * weight_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    if is_gated_first:
        wide *= share
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / size + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight  # rounded before the weight, as the reference does
    if not is_gated_first:
        normed *= share
    out_row = row * (tl.num_programs(1) * size)
    tl.store(out_ptr + out_row + at, normed.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def gated(x, gate):
    """Return `x * sigmoid(gate)`, with the sigmoid rounded as in the reference."""
    share = tl.sigmoid(gate.to(tl.float32)).to(gate.dtype).to(tl.float32)
    return (x.to(tl.float32) * share).to(x.dtype)


@triton.jit
def sigmoid_gate_kernel(x_ptr, x_stride, gate_ptr, gate_stride, out_ptr, size, block: tl.constexpr):
    """Gate a part of row `program_id(0)`: x, gate and out [T, size], rows of x and gate the strides apart."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=is_inside, other=0.0)
    tl.store(out_ptr + row * size + columns, gated(x, gate), mask=is_inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, is_gated_first: bool) -> Tensor:
    """Compute `kernels.recurrent.gates.gated_norm` in one launch."""
    num_weights, size = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    launch(
        gated_norm_kernel,
        (x.shape[0], x.shape[1] // size),
        x,
        x.stride(0),
        gate,
        gate.stride(0),
        weight,
        size if num_weights > 1 else 0,
        out,
        eps,
        size=size,
        is_gated_first=is_gated_first,
        block=block,
        num_warps=min(max(block // 512, 1), 8),
    )
    return out


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Compute `kernels.recurrent.gates.sigmoid_gate` in one launch."""
    num_tokens, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        sigmoid_gate_kernel,
        (num_tokens, triton.cdiv(size, _BLOCK)),
        x,
        x.stride(0),
        gate,
        gate.stride(0),
        out,
        size,
        block=_BLOCK,
        num_warps=4,
    )
    return out
