"""The kernels of paged attention: partial results of a tile of queries, and the sum of partial results."""

from __future__ import annotations

import triton
import triton.language as tl

from moeflow.kernels.triton.attention_positions import TREE, own_masks, tiles_of_rows, tiles_of_splits, visible
from moeflow.kernels.triton.gates import gated

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)  # softmax is computed with powers of two


@triton.jit
def product(a, b):
    """Multiply a [M, K] by b [K, N], widened or narrowed to a's numbers."""
    return tl.dot(a, b.to(a.dtype), input_precision="ieee")


@triton.jit
def scaled(found, key_scales, latent_found, value_scales, latent_dim: tl.constexpr, has_scales: tl.constexpr):
    """Return products [M, N] of queries and keys, times the scales of keys [N]."""
    if has_scales:
        found *= key_scales[None, :]
        if latent_dim > 0:
            found += latent_found * value_scales[None, :]
    elif latent_dim > 0:
        found += latent_found
    return found


@triton.jit
def scores_of(found, scale, soft_cap, has_soft_cap: tl.constexpr):
    """Return scores to the base of two: products times the scale, and maybe capped."""
    if has_soft_cap:
        tanh = 1.0 - 2.0 / (tl.exp2(found * (2.0 * LOG2_E * scale / soft_cap)) + 1.0)
        return tanh * (soft_cap * LOG2_E)
    else:
        return found * (scale * LOG2_E)


@triton.jit
def attention_kernel(
    q_ptr,  # [T, Q, D], with strides of tokens and heads
    keys_ptr,  # [B, KV, D, block_size], with strides of blocks and heads; latent: [B, KV, block_size, D]
    values_ptr,  # [B, KV, block_size, D], with the strides of keys
    key_scales_ptr,  # [B, KV, block_size] float32; latent: of the dimensions that are not values
    value_scales_ptr,  # [B, KV, block_size] float32
    sequences_ptr,  # [4, S] int32, see `DeviceTable`
    block_ids_ptr,  # [n] int32
    tree_masks_ptr,  # [T] int64
    sinks_ptr,  # [Q]
    out_ptr,  # [T, Q, V], written if not `is_split`
    sums_ptr,  # [T, Q, num_splits, V] float32: sums of weighted values, written if `is_split`
    stats_ptr,  # [2, T, Q, num_splits] float32: largest scores (of base 2) and sums of weights, likewise
    q_token_stride,
    q_head_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    num_tokens,
    scale,
    soft_cap,
    window,
    num_splits,
    has_window: tl.constexpr,
    has_trees: tl.constexpr,
    has_scales: tl.constexpr,
    has_sinks: tl.constexpr,
    has_soft_cap: tl.constexpr,
    is_split: tl.constexpr,
    group: tl.constexpr,  # query heads of a KV head
    head_dim: tl.constexpr,
    latent_dim: tl.constexpr,  # 0: values are stored by themselves
    block_size: tl.constexpr,
    run: tl.constexpr,  # positions from a multiple of it lie next to each other
    tile_rows: tl.constexpr,  # M
    tile_tokens: tl.constexpr,  # N
):
    """Attend from one tile of rows, of KV head and split `program_id(1)` and sequence `program_id(2)`."""
    sequence = tl.program_id(2)
    num_sequences = tl.num_programs(2)
    kv_head = tl.program_id(1) // num_splits
    split = tl.program_id(1) % num_splits
    row_begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * tile_rows  # the longest work starts first
    count = tl.load(sequences_ptr + 2 * num_sequences + sequence)
    start = tl.load(sequences_ptr + num_sequences + sequence)
    stop = start + count
    first, end, share = tiles_of_splits(start, stop, window, num_splits, has_window, has_trees, tile_tokens)
    begin = first + split * share
    end = tl.minimum(begin + share, end)
    if (row_begin >= count * group) | (begin >= end):
        return

    rows = row_begin + tl.arange(0, tile_rows)
    queries = start + rows // group
    heads = kv_head * group + rows % group
    is_row = rows < count * group
    tokens = tl.load(sequences_ptr + sequence) + rows // group
    q_rows = q_ptr + tokens.to(tl.int64) * q_token_stride + heads * q_head_stride
    value_dim: tl.constexpr = latent_dim if latent_dim > 0 else head_dim
    dims = tl.arange(0, max(16, triton.next_power_of_2(value_dim)))
    is_dim = dims < value_dim
    q = tl.load(q_rows[:, None] + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    if latent_dim > 0:  # the other dimensions of keys
        others = latent_dim + tl.arange(0, max(16, triton.next_power_of_2(head_dim - latent_dim)))
        is_other = others < head_dim
        q_other = tl.load(q_rows[:, None] + others[None, :], mask=is_row[:, None] & is_other[None, :], other=0.0)

    last_query = start + tl.minimum((row_begin + tile_rows - 1) // group, count - 1)
    begin, full_begin, full_end, end = tiles_of_rows(
        begin, end, start + row_begin // group, last_query, stop, window, has_window, has_trees, tile_tokens
    )
    masks = own_masks(tree_masks_ptr, tokens, is_row, queries, stop, has_trees)
    largest = tl.full((tile_rows,), float("-inf"), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    if has_sinks:
        largest = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += tl.where(split == 0, 1.0, 0.0)  # once in the sum of all splits
    sums = tl.zeros((tile_rows, dims.shape[0]), tl.float32)
    no_scales = tl.zeros((tile_tokens,), tl.float32)
    block_ids_ptr += tl.load(sequences_ptr + 3 * num_sequences + sequence)
    keys_ptr += kv_head * head_stride
    values_ptr += kv_head * head_stride
    key_scales_ptr += kv_head * scale_head_stride
    value_scales_ptr += kv_head * scale_head_stride
    # Tiles before the full ones, only with a window; full ones, without masks; tiles after them.
    for phase in tl.static_range(0 if has_window else 1, 3):
        phase_begin = begin if phase == 0 else (full_begin if phase == 1 else full_end)
        phase_end = full_begin if phase == 0 else (full_end if phase == 1 else end)
        for tile in tl.range(phase_begin, phase_end):
            positions = tile * tile_tokens + tl.arange(0, tile_tokens)
            is_stored = positions < stop
            # Beyond the last position the last block is read again, unmasked: a mask would narrow the loads.
            ids = tl.load(block_ids_ptr + tl.minimum(positions, stop - 1) // block_size).to(tl.int64)
            offsets = positions % block_size
            row_offsets = (ids * block_stride + offsets * head_dim)[:, None]
            key_scales, value_scales, latent_found = no_scales, no_scales, 0.0
            if has_scales:
                scale_offsets = ids * scale_block_stride + offsets
                key_scales = tl.load(key_scales_ptr + scale_offsets)
                value_scales = tl.load(value_scales_ptr + scale_offsets, mask=is_stored, other=0.0)
            if latent_dim > 0:
                v = tl.load(values_ptr + row_offsets + dims[None, :], mask=is_dim[None, :], other=0.0)
                k = tl.load(keys_ptr + row_offsets + others[None, :], mask=is_other[None, :], other=0.0)
                latent_found = product(q, tl.trans(v))
                found = product(q_other, tl.trans(k))
            else:
                in_a_row = tl.max_contiguous(tl.multiple_of(ids * block_stride + offsets, run), run)
                k = tl.load(keys_ptr + in_a_row[None, :] + dims[:, None] * block_size, mask=is_dim[:, None], other=0.0)
                v = tl.load(values_ptr + row_offsets + dims[None, :], mask=is_dim[None, :], other=0.0)
                found = product(q, k)
            found = scaled(found, key_scales, latent_found, value_scales, latent_dim, has_scales)
            found = scores_of(found, scale, soft_cap, has_soft_cap)
            if phase != 1:
                seen = visible(queries[:, None], positions[None, :], masks, stop - TREE, window, has_window, has_trees)
                found = tl.where(seen, found, float("-inf"))
                v = tl.where(is_stored[:, None], v, 0.0)  # unwritten values may be NaN
            new_largest = tl.maximum(largest, tl.max(found, axis=1))
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row may have seen nothing yet
            weights = tl.exp2(found - base[:, None])
            decay = tl.exp2(largest - base)
            total = total * decay + tl.sum(weights, axis=1)
            largest = new_largest
            if has_scales:
                weights *= value_scales[None, :]
            sums = sums * decay[:, None] + product(weights.to(q.dtype), v)

    out_rows = tokens.to(tl.int64) * (tl.num_programs(1) // num_splits * group) + heads
    is_out = is_row[:, None] & is_dim[None, :]
    if is_split:
        parts = out_rows * num_splits + split
        num_parts = num_tokens * (tl.num_programs(1).to(tl.int64) * group)
        tl.store(sums_ptr + parts[:, None] * value_dim + dims[None, :], sums, mask=is_out)
        tl.store(stats_ptr + parts, largest, mask=is_row)
        tl.store(stats_ptr + num_parts + parts, total, mask=is_row)
    else:
        out = sums / tl.where(is_row, total, 1.0)[:, None]
        out_pointers = out_ptr + out_rows[:, None] * value_dim + dims[None, :]
        tl.store(out_pointers, out.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def combine_kernel(
    sums_ptr,  # [T, Q, num_splits, V] float32
    stats_ptr,  # [2, T, Q, num_splits] float32
    out_ptr,  # [T, Q, V]
    sequences_ptr,  # [4, S] int32
    gates_ptr,  # [T, Q * V], in rows of gate_stride
    gate_stride,
    num_sequences,
    window,
    num_splits,
    has_window: tl.constexpr,
    has_trees: tl.constexpr,
    has_gates: tl.constexpr,
    tile_tokens: tl.constexpr,
    value_dim: tl.constexpr,
    part_dims: tl.constexpr,
    most_splits: tl.constexpr,
    most_sequences: tl.constexpr,
):
    """Add partial results of token `program_id(0)`, head `program_id(1)` and dimensions `program_id(2)`."""
    token = tl.program_id(0)
    numbers = tl.arange(0, most_sequences)
    is_sequence = numbers < num_sequences
    firsts = tl.load(sequences_ptr + numbers, mask=is_sequence, other=0)
    counts = tl.load(sequences_ptr + 2 * num_sequences + numbers, mask=is_sequence, other=0)
    holds = (firsts <= token) & (token < firsts + counts)
    is_held = tl.sum(holds.to(tl.int32), axis=0) > 0
    sequence = tl.sum(tl.where(holds, numbers, 0), axis=0)
    start = tl.load(sequences_ptr + num_sequences + sequence)
    count = tl.load(sequences_ptr + 2 * num_sequences + sequence)
    first, end, share = tiles_of_splits(start, start + count, window, num_splits, has_window, has_trees, tile_tokens)
    splits = tl.arange(0, most_splits)
    num_tiles = tl.where(is_held, end - first, 0)
    is_split = splits * share < num_tiles

    row = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    num_rows = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    parts = row * num_splits + splits
    largest = tl.load(stats_ptr + parts, mask=is_split, other=float("-inf"))
    totals = tl.load(stats_ptr + num_rows * num_splits + parts, mask=is_split, other=0.0)
    base = tl.max(largest, axis=0)
    factors = tl.where(is_split, tl.exp2(largest - tl.where(is_held, base, 0.0)), 0.0)
    total = tl.sum(totals * factors, axis=0)
    dims = tl.program_id(2) * part_dims + tl.arange(0, part_dims)
    is_dim = dims < value_dim
    sums = tl.load(
        sums_ptr + parts[:, None] * value_dim + dims[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0
    )
    out = (tl.sum(sums * factors[:, None], axis=0) / tl.where(is_held, total, 1.0)).to(out_ptr.dtype.element_ty)
    if has_gates:
        gate = tl.load(
            gates_ptr + token.to(tl.int64) * gate_stride + tl.program_id(1) * value_dim + dims, mask=is_dim, other=0.0
        )
        out = gated(out, gate)
    tl.store(out_ptr + row * value_dim + dims, out, mask=is_dim)
