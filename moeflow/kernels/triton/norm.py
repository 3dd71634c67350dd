"""Norms of rows, one program for each row. The reference is `kernels/norm.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def normed_row(
    x, is_inside, columns, size, weight_ptr, bias_ptr, eps, subtracts_mean: tl.constexpr, has_bias: tl.constexpr
):
    """Return a row of float32 numbers normalised, zeros where not `is_inside`, as float32."""
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
    sum_ptr,
    out_ptr,
    size,
    stride,
    eps,
    has_residual: tl.constexpr,
    subtracts_mean: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
):
    """Normalise row `program_id(0)` of x, [n, size] with a stride between rows; with a residual that of their sum.

    residual, sum and out: [n, size], contiguous; the sum is stored where there is a residual.
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
    y = normed_row(x, is_inside, columns, size, weight_ptr, bias_ptr, eps, subtracts_mean, has_bias)
    tl.store(out_ptr + row * size + columns, y.to(out_ptr.dtype.element_ty), mask=is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rows over their root mean square, times weights. Shapes: x [..., H], weight [H] -> [..., H]."""
    return _normalise(x, weight, None, eps, subtracts_mean=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return what a layer norm makes of rows. Shapes: x [..., H], weight and bias [H] -> [..., H]."""
    return _normalise(x, weight, bias, eps, subtracts_mean=True)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, subtracts_mean: bool
) -> tuple[Tensor, Tensor]:
    """Return `x + residual` and that normalised, in one launch. Shapes: [..., H] all."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = _normalise(x, weight, bias, eps, subtracts_mean=subtracts_mean, residual=residual, total=total)
    return total, normed


def _normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    subtracts_mean: bool,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
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
        out if total is None else total,
        out,
        size,
        rows.stride(0),
        eps,
        has_residual=residual is not None,
        subtracts_mean=subtracts_mean,
        has_bias=bias is not None,
        block=block,
        num_warps=min(max(block // 512, 1), 8),
    )
    return out
