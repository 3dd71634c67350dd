"""Parts of kernels that multiply by weights: tiles of weights as floats, and a network's activation.

A weight matrix [num_rows, size] has whole rows of `size` columns. Formats: "float", "int8" and "int4"
(planar_weights.py). `is_even` promises that tiles end where the matrix ends, so loads need no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(pointer, rows, columns, row_size, num_rows, is_even: tl.constexpr):
    """Return `pointer[rows, columns]` of rows of `row_size` elements, 0 beyond the edges."""
    places = pointer + rows.to(tl.int64)[:, None] * row_size + columns[None, :]
    if is_even:
        tile = tl.load(places)
    else:
        tile = tl.load(places, mask=(rows[:, None] < num_rows) & (columns[None, :] < row_size), other=0)
    return tile


@triton.jit
def load_values(
    pointer,
    rows,
    start,
    num_rows,
    size: tl.constexpr,
    weight_format: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
):
    """Return weights of some rows and columns from `start` on, before their scales: [block_n, block_k] floats."""
    if weight_format == "int4":
        words = load_tile(pointer, rows, start // 8 + tl.arange(0, block_k // 8), size // 8, num_rows, is_even)
        shifts = 4 * tl.arange(0, 8)
        codes = (words[:, :, None] >> shifts[None, None, :]) & 15
        # 0x4B000000 is 2^23, and with a code in its low bits 2^23 + code. To convert integers would take more cycles.
        floats = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
        values = tl.reshape(floats, (block_n, block_k))
    elif weight_format == "int8":
        columns = start + tl.arange(0, block_k)
        values = load_tile(pointer, rows, columns, size, num_rows, is_even).to(tl.float32)
    else:
        values = load_tile(pointer, rows, start + tl.arange(0, block_k), size, num_rows, is_even)
    return values


@triton.jit
def load_scales(pointer, rows, start, num_rows, size: tl.constexpr, block_k: tl.constexpr, is_even: tl.constexpr):
    """Return the scales of the groups of 32 columns from `start` on: [block_n, block_k / 32] float32."""
    groups = start // 32 + tl.arange(0, block_k // 32)
    return load_tile(pointer, rows, groups, size // 32, num_rows, is_even).to(tl.float32)


@triton.jit
def load_weights(
    values_ptr,
    scales_ptr,
    rows,
    start,
    num_rows,
    size: tl.constexpr,
    weight_format: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
):
    """Return weights with their scales: [block_n, block_k] floats."""
    values = load_values(values_ptr, rows, start, num_rows, size, weight_format, block_n, block_k, is_even)
    if weight_format == "float":
        weights = values
    else:
        scales = load_scales(scales_ptr, rows, start, num_rows, size, block_k, is_even)
        groups = tl.reshape(values, (block_n, block_k // 32, 32)) * scales[:, :, None]
        weights = tl.reshape(groups, (block_n, block_k))
    return weights


@triton.jit
def activate(gate, up, alpha, limit, function: tl.constexpr, is_gated: tl.constexpr):
    """Return hidden units; `function` numbers those of kernels/activation.py, -1: none. All float32."""
    if function == 4:  # ClampedSwiglu
        gate = tl.minimum(gate, limit)
        y = (tl.minimum(tl.maximum(up, -limit), limit) + 1.0) * gate * tl.sigmoid(alpha * gate)
    else:
        if function == 0:
            y = gate * tl.sigmoid(gate)
        elif function == 1:
            y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
        elif function == 2:  # 1 + tanh(z) is 2 sigmoid(2 z)
            y = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        elif function == 3:
            y = tl.maximum(gate, 0.0)
        else:
            y = gate
        if is_gated:
            y *= up
    return y
