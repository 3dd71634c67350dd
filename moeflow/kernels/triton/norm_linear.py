"""A norm of short rows and the product behind it, in one launch. The reference is `norm_linear` of `kernels/linear.py`.

Each program reads its rows twice, first for their length. That suits the few tokens of a decode pass. DeepSeek-V3
multiplies 1536 normalised numbers by 24576 x 1536 weights, 75 MB: 768 programs of 32 outputs, 23 us at 3.3 TB/s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from moeflow.kernels.norm import NormWeights
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import gpu_of, launch
from moeflow.kernels.triton.weight_tiles import load_tile

if TYPE_CHECKING:
    from torch import Tensor

_MOST_ROWS: Final = 64
_MOST_COLUMNS: Final = 2048  # longer rows are normalised once, by a kernel of their own
_LEAST_ROWS: Final = 16  # that tensor cores take
_BLOCK_N: Final = 32
_BLOCK_K: Final = 128


@triton.jit
def norm_linear_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    stride,
    eps,
    num_outputs,
    size: tl.constexpr,
    has_bias: tl.constexpr,
    is_even: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Compute `block_n` outputs of all rows.

    Shapes: x [T, size] in rows of `stride`, norm [size], weight [N, size], bias [N], out [T, N].
    """
    rows = tl.arange(0, block_m)
    outputs = tl.program_id(0) * block_n + tl.arange(0, block_n)
    columns = tl.arange(0, block_k)
    is_row = (rows < num_rows)[:, None]
    x_ptr += rows.to(tl.int64)[:, None] * stride + columns[None, :]
    squares = tl.zeros((block_m,), tl.float32)
    for start in range(0, size, block_k):
        x = tl.load(x_ptr + start, mask=is_row & (start + columns < size)[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(x * x, axis=1)
    factors = (1.0 / tl.sqrt_rn(squares / size + eps))[:, None]
    total = tl.zeros((block_m, block_n), tl.float32)
    for start in range(0, size, block_k):
        x = tl.load(x_ptr + start, mask=is_row & (start + columns < size)[None, :], other=0.0)
        norm = tl.load(norm_ptr + start + columns, mask=start + columns < size, other=0.0)
        normed = (x.to(tl.float32) * factors).to(norm.dtype).to(tl.float32) * norm.to(tl.float32)[None, :]
        weight = load_tile(weight_ptr, outputs, start + columns, size, num_outputs, size, is_even)
        total = tl.dot(normed.to(x.dtype), tl.trans(weight), total, input_precision="ieee")
    is_output = outputs < num_outputs
    if has_bias:
        total += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    places = out_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=is_row & is_output[None, :])


def takes(x: Tensor, norm: NormWeights) -> bool:
    """Return whether the kernel computes this: few short rows, without means, on a GPU with tensor cores."""
    is_small = 0 < len(x) <= _MOST_ROWS and x.shape[1] <= _MOST_COLUMNS
    return is_small and not norm.subtracts_mean and gpu_of(x).capability >= 80


def norm_linear(x: Tensor, norm: NormWeights, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `normalise(x, norm) @ weight.T + bias` in one launch.

    Shapes: x [T, H], whose rows may lie apart; weight [N, H], bias [N] -> [T, N].
    """
    num_rows, size = x.shape
    num_outputs = len(weight)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    launch(
        norm_linear_kernel,
        (triton.cdiv(num_outputs, _BLOCK_N),),
        x,
        norm.weight,
        weight,
        out if bias is None else bias,
        out,
        num_rows,
        x.stride(0),
        norm.eps,
        num_outputs,
        size=size,
        has_bias=bias is not None,
        is_even=num_outputs % _BLOCK_N == 0 and size % _BLOCK_K == 0,
        block_m=max(triton.next_power_of_2(num_rows), _LEAST_ROWS),
        block_n=_BLOCK_N,
        block_k=_BLOCK_K,
        num_warps=4,
        num_stages=4 if x.element_size() == 2 else 2,
    )
    return out
