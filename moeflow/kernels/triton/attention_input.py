"""All steps between the QKV projection and attention in one launch. Reference: `kernels/attention/attention_input.py`.

A program prepares some heads of one token: queries, keys or values. It has one warp and 512 numbers (four heads of
128). If a norm runs over all heads, it has all heads. The kernel reads and writes each number once. At one token
Qwen3-30B-A3B's 40 heads (10 KiB) are ten programs, and the launch itself takes longest. At 2048 tokens 20480 programs
move 42 MB, which takes 13 us at 3.3 TB/s. A partner in the rotation is loaded again, from the L1 cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.kv_cache import cell_pointers, heads_of_program, store_kv
from moeflow.kernels.triton.launching import launch
from moeflow.kernels.triton.rotation import inverse_rms, partner, rotated, source, weighted

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.attention.heads import Heads
    from moeflow.kernels.attention.kv_blocks import KVBlocks
    from moeflow.kernels.rotary import RotaryTable


@triton.jit
def prepared(
    row_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    heads,
    num_heads,
    head_dim,
    rotary_dim,
    eps,
    clip,
    has_norm: tl.constexpr,
    norms_all_heads: tl.constexpr,
    norms_last: tl.constexpr,
    has_clip: tl.constexpr,
    has_rotary: tl.constexpr,
    is_interleaved: tl.constexpr,
    block_dim: tl.constexpr,
):
    """Return some heads of a token, normalised, clipped and rotated.

    Shapes: row [num_heads * D], heads [N] -> [N, D] float32.
    """
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    dims = tl.arange(0, block_dim)[None, :]
    first = heads[:, None] * head_dim
    is_value = (heads < num_heads)[:, None] & (dims < head_dim)
    norm_first = first * 0
    norm_size = head_dim
    if norms_all_heads:
        norm_first = first
        norm_size = head_dim * num_heads
    places = dims
    if has_rotary:
        places = source(dims, rotary_dim, is_interleaved)
    x = tl.load(row_ptr + first + places, mask=is_value, other=0.0).to(tl.float32)
    if has_norm and not norms_last:
        factors = inverse_rms(x, norm_size, eps, norms_all_heads)
        x = weighted(x, factors, tl.load(norm_ptr + norm_first + places, mask=is_value, other=0.0), dtype)
    if has_clip:
        x = tl.minimum(tl.maximum(x, -clip), clip).to(dtype).to(tl.float32)
    if has_rotary:
        is_rotated = is_value & (dims < rotary_dim)
        others = source(partner(dims, rotary_dim), rotary_dim, is_interleaved)
        other = tl.load(row_ptr + first + others, mask=is_rotated, other=0.0).to(tl.float32)
        if has_norm and not norms_last:
            other = weighted(other, factors, tl.load(norm_ptr + norm_first + others, mask=is_rotated, other=0.0), dtype)
        if has_clip:
            other = tl.minimum(tl.maximum(other, -clip), clip).to(dtype).to(tl.float32)
        x = rotated(x, other, cos_ptr, sin_ptr, dims, rotary_dim, dtype)
    if has_norm and norms_last:
        factors = inverse_rms(x, norm_size, eps, norms_all_heads)
        x = weighted(x, factors, tl.load(norm_ptr + norm_first + dims, mask=is_value, other=0.0), dtype)
    return x


@triton.jit
def attention_input_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    v_norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    queries_ptr,
    cells_ptr,
    scales_ptr,
    stride,
    num_heads,
    num_kv_heads,
    head_dim,
    rotary_dim,
    eps,
    clip,
    has_q_norm: tl.constexpr,
    has_k_norm: tl.constexpr,
    has_v_norm: tl.constexpr,
    norms_all_heads: tl.constexpr,
    norms_last: tl.constexpr,
    has_clip: tl.constexpr,
    has_rotary: tl.constexpr,
    is_interleaved: tl.constexpr,
    block_size: tl.constexpr,
    is_int8: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
):
    """Prepare some heads of token `program_id(0)`: of queries, then of keys, then of values along axis 1.

    Shapes: qkv [T, (Q + 2 KV) * D]; q_norm, k_norm and v_norm [D], or [heads * D]; cos and sin [T, 1, R]; slots [T];
    queries [T, Q, D].
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_query_tiles = tl.cdiv(num_heads, block_heads)
    num_key_tiles = tl.cdiv(num_kv_heads, block_heads)
    row_ptr = qkv_ptr + token * stride
    cos_ptr += token * rotary_dim
    sin_ptr += token * rotary_dim
    numbers = tl.arange(0, block_heads)
    dims = tl.arange(0, block_dim)[None, :]
    if tile < num_query_tiles:
        heads = tile * block_heads + numbers
        x = prepared(
            row_ptr,
            q_norm_ptr,
            cos_ptr,
            sin_ptr,
            heads,
            num_heads,
            head_dim,
            rotary_dim,
            eps,
            clip,
            has_q_norm,
            norms_all_heads,
            norms_last,
            has_clip,
            has_rotary,
            is_interleaved,
            block_dim,
        )
        is_value = (heads < num_heads)[:, None] & (dims < head_dim)
        places = (token * num_heads + heads[:, None]) * head_dim + dims
        tl.store(queries_ptr + places, x.to(queries_ptr.dtype.element_ty), mask=is_value)
        return
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    row_ptr += num_heads * head_dim
    if tile < num_query_tiles + num_key_tiles:
        heads = (tile - num_query_tiles) * block_heads + numbers
        is_row = heads < num_kv_heads
        x = prepared(
            row_ptr,
            k_norm_ptr,
            cos_ptr,
            sin_ptr,
            heads,
            num_kv_heads,
            head_dim,
            rotary_dim,
            eps,
            clip,
            has_k_norm,
            norms_all_heads,
            norms_last,
            has_clip,
            has_rotary,
            is_interleaved,
            block_dim,
        )
        is_value = is_row[:, None] & (dims < head_dim)
        store_kv(
            cells_ptr, scales_ptr, x, slot, heads, num_kv_heads, head_dim, is_row, is_value, False, block_size, is_int8
        )
    else:
        heads = (tile - num_query_tiles - num_key_tiles) * block_heads + numbers
        is_row = heads < num_kv_heads
        x = prepared(
            row_ptr + num_kv_heads * head_dim,
            v_norm_ptr,
            cos_ptr,
            sin_ptr,
            heads,
            num_kv_heads,
            head_dim,
            rotary_dim,
            eps,
            clip,
            has_v_norm,
            False,
            False,
            has_clip,
            False,
            False,
            block_dim,
        )
        is_value = is_row[:, None] & (dims < head_dim)
        store_kv(
            cells_ptr, scales_ptr, x, slot, heads, num_kv_heads, head_dim, is_row, is_value, True, block_size, is_int8
        )


def attention_input(qkv: Tensor, heads: Heads, rotary: RotaryTable | None, blocks: KVBlocks, slots: Tensor) -> Tensor:
    """Prepare queries, keys and values, store K and V where slots are not negative, and return queries: one launch.

    Shapes: qkv [T, (Q + 2 KV) * D], or [T, Q * D] without keys; slots [T] int64 -> [T, Q, D].
    """
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    num_tokens, head_dim = len(qkv), heads.head_dim
    num_kv_heads = heads.num_kv_heads if heads.has_keys else 0
    queries = torch.empty(num_tokens, heads.num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    norms = (heads.q_norm, heads.k_norm, heads.v_norm)
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = heads_of_program(max(heads.num_heads, num_kv_heads), block_dim)
    if heads.norms_all_heads:
        block_heads = triton.next_power_of_2(max(heads.num_heads, num_kv_heads))
    num_tiles = triton.cdiv(heads.num_heads, block_heads) + 2 * triton.cdiv(num_kv_heads, block_heads)
    launch(
        attention_input_kernel,
        (num_tokens, num_tiles),
        qkv,
        *(qkv if norm is None else norm for norm in norms),
        *((qkv, qkv) if rotary is None else (rotary.cos, rotary.sin)),
        slots,
        queries,
        *cell_pointers(blocks),
        qkv.stride(0),
        heads.num_heads,
        num_kv_heads,
        head_dim,
        0 if rotary is None else rotary.dim,
        heads.eps,
        heads.clip or 0.0,
        has_q_norm=heads.q_norm is not None,
        has_k_norm=heads.k_norm is not None,
        has_v_norm=heads.v_norm is not None,
        norms_all_heads=heads.norms_all_heads,
        norms_last=heads.norms_last,
        has_clip=heads.clip is not None,
        has_rotary=rotary is not None,
        is_interleaved=heads.is_interleaved,
        block_size=blocks.block_size,
        is_int8=blocks.dtype == "int8",
        block_heads=block_heads,
        block_dim=block_dim,
        num_warps=min(max(block_heads * block_dim // 512, 1), 8),
        enable_fp_fusion=False,  # products are rounded before sums, as in the reference
    )
    return queries
