"""The steps of latent attention beside its products, in one launch: see `kernels/attention/latent_attention.py`.

A program rotates the rotary parts of some heads' queries, or stores one token's latent and rotary key. DeepSeek-V3 has
128 heads with 64 rotated dimensions: 16 programs for queries and one for the key at one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.kv_cache import cell_pointers, heads_of_program, store_latent
from moeflow.kernels.triton.launching import launch
from moeflow.kernels.triton.rotation import inverse_rms, partner, rotated, source, weighted

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.attention.kv_blocks import KVBlocks
    from moeflow.kernels.attention.latent_heads import LatentHeads
    from moeflow.kernels.rotary import RotaryTable


@triton.jit
def load_rotated(
    x_ptr, firsts, is_row, cos_ptr, sin_ptr, rope_dim, is_interleaved: tl.constexpr, block_rope: tl.constexpr
):
    """Return rotated rows that begin at `firsts`: firsts and is_row [N, 1], cos and sin [R] -> [N, R] float32."""
    dims = tl.arange(0, block_rope)[None, :]
    is_value = is_row & (dims < rope_dim)
    places = firsts + source(dims, rope_dim, is_interleaved)
    others = firsts + source(partner(dims, rope_dim), rope_dim, is_interleaved)
    x = tl.load(x_ptr + places, mask=is_value, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + others, mask=is_value, other=0.0).to(tl.float32)
    return rotated(x, other, cos_ptr, sin_ptr, dims, rope_dim, x_ptr.dtype.element_ty)


@triton.jit
def latent_input_kernel(
    q_ptr,
    kept_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    queries_ptr,
    cells_ptr,
    scales_ptr,
    q_stride,
    kept_stride,
    num_heads,
    nope_dim,
    rope_dim,
    latent_dim,
    eps,
    is_interleaved: tl.constexpr,
    block_size: tl.constexpr,
    is_int8: tl.constexpr,
    block_heads: tl.constexpr,
    block_rope: tl.constexpr,
    block_latent: tl.constexpr,
):
    """Rotate some heads' queries of token `program_id(0)`; the last program along axis 1 stores the token's key.

    Shapes: q [T, H, N + R], kept [T, L + R], norm [L], cos and sin [T, 1, R], slots [T], queries [T, H, L + R].
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    key_dim = latent_dim + rope_dim
    cos_ptr += token * rope_dim
    sin_ptr += token * rope_dim
    dims = tl.arange(0, block_rope)[None, :]
    if tile < tl.cdiv(num_heads, block_heads):
        heads = (tile * block_heads + tl.arange(0, block_heads))[:, None]
        is_row = heads < num_heads
        firsts = token * q_stride + heads * (nope_dim + rope_dim) + nope_dim
        x = load_rotated(q_ptr, firsts, is_row, cos_ptr, sin_ptr, rope_dim, is_interleaved, block_rope)
        places = (token * num_heads + heads) * key_dim + latent_dim + dims
        tl.store(queries_ptr + places, x.to(queries_ptr.dtype.element_ty), mask=is_row & (dims < rope_dim))
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            latent_dims = tl.arange(0, block_latent)[None, :]
            is_latent = latent_dims < latent_dim
            kept_ptr += token * kept_stride
            latent = tl.load(kept_ptr + latent_dims, mask=is_latent, other=0.0).to(tl.float32)
            weights = tl.load(norm_ptr + latent_dims, mask=is_latent, other=0.0)
            factors = inverse_rms(latent, latent_dim, eps, False)
            latent = weighted(latent, factors, weights, kept_ptr.dtype.element_ty)
            firsts = latent_dim + tl.zeros([1, 1], tl.int64)
            rest = load_rotated(kept_ptr, firsts, firsts >= 0, cos_ptr, sin_ptr, rope_dim, is_interleaved, block_rope)
            store_latent(
                cells_ptr,
                scales_ptr,
                latent,
                rest,
                slot,
                latent_dim,
                key_dim,
                is_latent,
                dims < rope_dim,
                block_size,
                is_int8,
            )


def latent_input(
    q: Tensor, kept: Tensor, heads: LatentHeads, rotary: RotaryTable, blocks: KVBlocks, slots: Tensor
) -> Tensor:
    """Store latents and rotary keys where slots are not negative, and return queries with their rotary parts alone.

    One launch. The first L dimensions of a query are not set.
    Shapes: q [T, H * (N + R)], kept [T, L + R], rows of both may lie apart; slots [T] int64 -> [T, H, L + R].
    """
    queries = torch.empty(len(q), heads.num_heads, heads.key_dim, dtype=q.dtype, device=q.device)
    block_rope = triton.next_power_of_2(heads.rope_dim)
    block_heads = heads_of_program(heads.num_heads, block_rope)
    launch(
        latent_input_kernel,
        (len(q), triton.cdiv(heads.num_heads, block_heads) + 1),
        q,
        kept,
        heads.latent_norm.weight,
        rotary.cos,
        rotary.sin,
        slots,
        queries,
        *cell_pointers(blocks),
        q.stride(0),
        kept.stride(0),
        heads.num_heads,
        heads.nope_dim,
        heads.rope_dim,
        heads.latent_dim,
        heads.latent_norm.eps,
        is_interleaved=heads.is_interleaved,
        block_size=blocks.block_size,
        is_int8=blocks.dtype == "int8",
        block_heads=block_heads,
        block_rope=block_rope,
        block_latent=triton.next_power_of_2(heads.latent_dim),
        num_warps=1,
        enable_fp_fusion=False,  # products are rounded before sums, as in the reference
    )
    return queries
