"""Rotary positions and norms of heads in registers, for kernels that prepare queries and keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def partner(dims, rotary_dim):
    """Return the dimensions that dimensions are rotated against."""
    half = rotary_dim // 2
    return tl.where(dims < half, dims + half, dims - half)


@triton.jit
def source(dims, rotary_dim, is_interleaved: tl.constexpr):
    """Return where the numbers of rotated dimensions lie: of neighbours, the first of each pair come first."""
    if not is_interleaved:
        return dims
    half = rotary_dim // 2
    places = tl.where(dims < half, 2 * dims, 2 * (dims - half) + 1)
    return tl.where(dims < rotary_dim, places, dims)


@triton.jit
def rotated(x, other, cos_ptr, sin_ptr, dims, rotary_dim, dtype: tl.constexpr):
    """Return x rotated against its partners, rounded as the reference does. Shapes: x and other [N, D], dims [1, D]."""
    is_rotated = dims < rotary_dim
    cos = tl.load(cos_ptr + dims, mask=is_rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + dims, mask=is_rotated, other=0.0).to(tl.float32)
    return ((x * cos).to(dtype).to(tl.float32) + other * sin).to(dtype).to(tl.float32)


@triton.jit
def inverse_rms(x, size, eps, over_all_rows: tl.constexpr):
    """Return the factor of each row, or of all rows as one. Shapes: x [N, D] -> [N, 1]."""
    squares = tl.sum(x * x, axis=1)
    if over_all_rows:
        squares = tl.zeros_like(squares) + tl.sum(squares, axis=0)
    return (1.0 / tl.sqrt_rn(squares / size + eps))[:, None]


@triton.jit
def weighted(x, factors, weights, dtype: tl.constexpr):
    """Return x times factors, then times weights, rounded after each product as the reference does."""
    return ((x * factors).to(dtype).to(tl.float32) * weights.to(tl.float32)).to(dtype).to(tl.float32)
