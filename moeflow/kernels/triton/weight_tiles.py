"""Parts of kernels that multiply by weights: tiles of weights as floats, and a network's activation.

A weight matrix [num_rows, size] has rows of `value_row` elements, and rows of `scale_row` elements with the scales of
groups of `group` columns. The formats are "float" and those of planar_weights.py. `is_even` promises that tiles end
where the matrix ends, so loads need no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(pointer, rows, columns, stride, num_rows, num_columns, is_even: tl.constexpr):
    """Return `pointer[rows, columns]`, 0 beyond the edges."""
    places = pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if is_even:
        tile = tl.load(places)
    else:
        tile = tl.load(places, mask=(rows[:, None] < num_rows) & (columns[None, :] < num_columns), other=0)
    return tile


@triton.jit
def small_float(bits):
    """Return floats of the bits of float16 numbers, given as int32. Exact, subnormal numbers included."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def unpack_words(words, bits: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr):
    """Return the codes of `bits` bits in 32-bit words, lowest first: [block_n, block_k] int32."""
    shifts = bits * tl.arange(0, 32 // bits)
    codes = (words[:, :, None] >> shifts[None, None, :]) & ((1 << bits) - 1)
    return tl.reshape(codes, (block_n, block_k))


@triton.jit
def load_values(
    pointer,
    rows,
    start,
    num_rows,
    size: tl.constexpr,
    value_row: tl.constexpr,
    weight_format: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
):
    """Return weights of some rows and columns from `start` on, before their scales: [block_n, block_k] floats."""
    if weight_format == "float" or weight_format == "int8" or weight_format == "int8-zero" or weight_format == "fp8":
        values = load_tile(pointer, rows, start + tl.arange(0, block_k), value_row, num_rows, size, is_even)
        if weight_format == "int8" or weight_format == "int8-zero":
            values = values.to(tl.float32)
        elif weight_format == "fp8":  # e4m3 has four bits of an exponent that float16 raises by 8
            bits = values.to(tl.int32)
            values = small_float(((bits & 0x80) << 8) | ((bits & 0x7F) << 7)) * 256.0
    else:
        words = load_tile(
            pointer, rows, start // 8 + tl.arange(0, block_k // 8), value_row, num_rows, size // 8, is_even
        )
        codes = unpack_words(words, 4, block_n, block_k)
        if weight_format == "q6_k":
            places = start // 16 + tl.arange(0, block_k // 16)
            high = load_tile(pointer + size // 8, rows, places, value_row, num_rows, size // 16, is_even)
            codes |= unpack_words(high, 2, block_n, block_k) << 4
        elif weight_format == "q5_k":
            places = start // 32 + tl.arange(0, block_k // 32)
            high = load_tile(pointer + size // 8, rows, places, value_row, num_rows, size // 32, is_even)
            codes |= unpack_words(high, 1, block_n, block_k) << 4
        if weight_format == "mxfp4":  # e2m1 has two bits of an exponent that float16 raises by 14; doubled
            values = small_float(((codes & 8) << 12) | ((codes & 7) << 9)) * 32768.0
        else:
            # 0x4B000000 is 2^23, and with a code in its low bits 2^23 + code. Conversions would take more cycles.
            raised = (codes | 0x4B000000).to(tl.float32, bitcast=True)
            if weight_format == "int4":
                values = raised - 8388616.0
            elif weight_format == "q6_k":
                values = raised - 8388640.0
            else:
                values = raised - 8388608.0
    return values


@triton.jit
def load_scales(
    pointer,
    rows,
    start,
    num_rows,
    size: tl.constexpr,
    scale_row: tl.constexpr,
    weight_format: tl.constexpr,
    group: tl.constexpr,
    inner: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
):
    """Return scales and offsets of the groups of the columns from `start` on: [block_n, block_k / inner] float32.

    A weight is its value times the scale, plus the offset in formats that have one.
    """
    groups = start // group + tl.arange(0, block_k // inner)
    if (
        weight_format == "q4_k" or weight_format == "q5_k" or weight_format == "q6_k"
    ):  # a head and four words with 16 bytes for 256 columns
        first = groups // (256 // group) * 5
        step = groups % (256 // group)
        head = load_tile(pointer, rows, first, scale_row, num_rows, scale_row, is_even)
        if weight_format != "q6_k":
            small = load_tile(pointer, rows, first + 1 + step // 2, scale_row, num_rows, scale_row, is_even)
            small = small >> (step % 2 * 16)[None, :]
            scales = small_float(head) * (small & 255).to(tl.float32)
            offsets = -small_float(head >> 16) * ((small >> 8) & 255).to(tl.float32)
        else:
            small = load_tile(pointer, rows, first + 1 + step // 4, scale_row, num_rows, scale_row, is_even)
            small = (small << (24 - step % 4 * 8)[None, :]) >> 24
            scales = small_float(head) * small.to(tl.float32)
            offsets = scales
    else:
        found = load_tile(pointer, rows, groups, scale_row, num_rows, scale_row, is_even)
        if weight_format == "mxfp4":  # exponents, of halves of scales; those of 0 and 1 are subnormal
            exponents = found.to(tl.int32)
            bits = tl.where(exponents < 2, (exponents + 1) << 21, (exponents - 1) << 23)
            scales = bits.to(tl.float32, bitcast=True)
            offsets = scales
        elif (
            weight_format == "int4-zero" or weight_format == "int8-zero"
        ):  # 16 bits of a scale, 15 of a zero point, and whether the scale is bfloat16
            wide = (found << 16).to(tl.float32, bitcast=True)
            scales = tl.where(found < 0, wide, small_float(found))
            offsets = -scales * ((found >> 16) & 0x7FFF).to(tl.float32)
        else:
            scales = found.to(tl.float32)
            offsets = scales
    return scales, offsets


@triton.jit
def load_weights(
    values_ptr,
    scales_ptr,
    rows,
    start,
    num_rows,
    size: tl.constexpr,
    value_row: tl.constexpr,
    scale_row: tl.constexpr,
    weight_format: tl.constexpr,
    group: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_even: tl.constexpr,
):
    """Return weights with their scales: [block_n, block_k] floats."""
    values = load_values(values_ptr, rows, start, num_rows, size, value_row, weight_format, block_n, block_k, is_even)
    if weight_format == "float":
        weights = values
    else:
        inner: tl.constexpr = group if group < block_k else block_k
        scales, offsets = load_scales(
            scales_ptr, rows, start, num_rows, size, scale_row, weight_format, group, inner, block_k, is_even
        )
        parts = tl.reshape(values, (block_n, block_k // inner, inner)) * scales[:, :, None]
        if (
            weight_format == "q4_k"
            or weight_format == "q5_k"
            or weight_format == "int4-zero"
            or weight_format == "int8-zero"
        ):
            parts += offsets[:, :, None]
        weights = tl.reshape(parts, (block_n, block_k))
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
