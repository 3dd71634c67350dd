"""Norms of rows, one program for each row, and the sums before or after them. The reference is `kernels/norm.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def normalised(
    x, weight_ptr, bias_ptr, columns, is_inside, size, eps, subtracts_mean: tl.constexpr, has_bias: tl.constexpr
):
    """Return the norm of a row: x [block] float32, 0 outside -> [block] float32, not rounded."""
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0)
    if subtracts_mean:
        x = tl.where(is_inside, x - tl.sum(x, axis=0) / size, 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / size + eps)
    if subtracts_mean:
        y = x * scale * weight.to(tl.float32)
        if has_bias:
            y += tl.load(bias_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    else:  # rounded before the weight, as the reference does
        y = (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    return y


@triton.jit
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    hidden_ptr,
    factor_ptr,
    sum_ptr,
    out_ptr,
    next_weight_ptr,
    next_bias_ptr,
    next_ptr,
    size,
    stride,
    eps,
    next_eps,
    has_residual: tl.constexpr,
    subtracts_mean: tl.constexpr,
    has_bias: tl.constexpr,
    has_hidden: tl.constexpr,
    has_factor: tl.constexpr,
    has_next: tl.constexpr,
    block: tl.constexpr,
):
    """Store `sum = x + residual` if there is a residual, then `out = (hidden + norm(sum)) * factor`, of one row.

    With a next norm, which is of the same kind, also `next = norm(out)`.
    Shapes: x [T, size] in rows of `stride`; residual, hidden, sum, out and next [T, size], contiguous; weights and
    biases [size]; factor [1].
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    is_inside = columns < size
    x = tl.load(x_ptr + row * stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    if has_residual:
        x += tl.load(residual_ptr + row * size + columns, mask=is_inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * size + columns, rounded, mask=is_inside)
        x = rounded.to(tl.float32)
    y = normalised(x, weight_ptr, bias_ptr, columns, is_inside, size, eps, subtracts_mean, has_bias)
    y = y.to(out_ptr.dtype.element_ty)
    if has_hidden:
        hidden = tl.load(hidden_ptr + row * size + columns, mask=is_inside, other=0.0)
        y = (hidden.to(tl.float32) + y.to(tl.float32)).to(out_ptr.dtype.element_ty)
    if has_factor:
        y = (y.to(tl.float32) * tl.load(factor_ptr).to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + columns, y, mask=is_inside)
    if has_next:
        y = tl.where(is_inside, y.to(tl.float32), 0.0)
        y = normalised(y, next_weight_ptr, next_bias_ptr, columns, is_inside, size, next_eps, subtracts_mean, has_bias)
        tl.store(next_ptr + row * size + columns, y.to(next_ptr.dtype.element_ty), mask=is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rows over their root mean square, times weights. Shapes: x [..., H], weight [H] -> [..., H]."""
    return normalise(x, weight, None, eps, subtracts_mean=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return what a layer norm makes of rows. Shapes: x [..., H], weight and bias [H] -> [..., H]."""
    return normalise(x, weight, bias, eps, subtracts_mean=True)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, subtracts_mean: bool
) -> tuple[Tensor, Tensor]:
    """Return `x + residual` and that normalised, in one launch. Shapes: [..., H] all."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = normalise(x, weight, bias, eps, subtracts_mean=subtracts_mean, residual=residual, total=total)
    return total, normed


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    subtracts_mean: bool,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    hidden: Tensor | None = None,
    factor: Tensor | None = None,
    next_norm: Any = None,
    normed: Tensor | None = None,
) -> Tensor:
    """Return the norm of rows, of their sum with a residual, plus hidden states, times a factor, in one launch.

    `total` receives the sum. `normed` receives the norm of the result by `next_norm`, a `NormWeights` of the same kind.
    Shapes: x, residual, total, hidden and normed [..., H], weight and bias [H], factor [1] -> [..., H].
    """
    size = x.shape[-1]
    rows = x.view(-1, size) if x.is_contiguous() else x.reshape(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    launch(
        norm_kernel,
        (len(rows),),
        rows,
        rows if residual is None else residual.contiguous(),
        weight,
        weight if bias is None else bias,
        rows if hidden is None else hidden.contiguous(),
        weight if factor is None else factor,
        out if total is None else total,
        out,
        weight if next_norm is None else next_norm.weight,
        weight if next_norm is None or next_norm.bias is None else next_norm.bias,
        out if normed is None else normed,
        size,
        rows.stride(0),
        eps,
        eps if next_norm is None else next_norm.eps,
        has_residual=residual is not None,
        subtracts_mean=subtracts_mean,
        has_bias=bias is not None,
        has_hidden=hidden is not None,
        has_factor=factor is not None,
        has_next=next_norm is not None,
        block=block,
        num_warps=min(max(block // 512, 1), 8),
    )
    return out
