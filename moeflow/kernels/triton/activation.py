"""Activations times their ups. The reference is `kernels/activation.py`.

A program reads 1024 gates and as many ups, and writes as many products: memory bounds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


@triton.jit
def activation(x, function: tl.constexpr):
    """Return a function of float32 numbers: silu, gelu, gelu_tanh or relu."""
    if function == "relu":
        return tl.where(x < 0.0, 0.0, x)
    if function == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    argument = x
    if function == "gelu_tanh":  # 1 + tanh(z) is 2 * sigmoid(2 z)
        argument = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-argument))


@triton.jit
def clamped_swiglu(gate, up, alpha, limit, dtype: tl.constexpr):
    """Return `(up + 1) * gate * sigmoid(alpha * gate)` of clamped float32 numbers, rounded after each step."""
    limit = (tl.zeros_like(gate) + limit).to(dtype).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    scaled = (gate * alpha).to(dtype).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-scaled))).to(dtype).to(tl.float32)
    return (share * gate).to(dtype).to(tl.float32) * (up + 1.0).to(dtype).to(tl.float32)


@triton.jit
def apply_and_mul_kernel(gate_up_ptr, out_ptr, size, stride, alpha, limit, function: tl.constexpr, block: tl.constexpr):
    """Compute a part of row `program_id(0)`: gate_up [T, 2 size], out [T, size]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < size
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    gate_up_ptr += row * stride
    gate = tl.load(gate_up_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + size + columns, mask=is_inside, other=0.0).to(tl.float32)
    if function == "clamped_swiglu":
        product = clamped_swiglu(gate, up, alpha, limit, dtype)
    else:
        product = activation(gate, function).to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row * size + columns, product.to(dtype), mask=is_inside)


def apply_and_mul(gate_up: Tensor, function: str, *, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    """Return `function(gate) * up` in one launch; `alpha` and `limit` belong to "clamped_swiglu".

    Shapes: gate_up [..., 2I] -> [..., I].
    """
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    gate_up = gate_up.reshape(-1, 2 * size)
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    num_tokens = len(gate_up)
    launch(
        apply_and_mul_kernel,
        (num_tokens, triton.cdiv(size, _BLOCK)),
        gate_up,
        out,
        size,
        gate_up.stride(0),
        alpha,
        limit,
        function=function,
        block=_BLOCK,
        num_warps=4,
    )
    return out
