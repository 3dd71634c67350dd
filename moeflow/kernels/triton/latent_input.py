"""The steps of latent attention before attention itself: see `kernels/attention/latent_attention.py`.

A program rotates the rotary parts of some heads' queries, or stores one token's latent and rotary key. DeepSeek-V3 has
128 heads with 64 rotated dimensions: 16 programs for queries and one for the key at one token.

For few tokens, further programs of the same launch multiply queries by the projection of keys. Each reads 64 columns of
one head, 16 KB, once for all tokens: 1024 programs for the 16.8 MB of DeepSeek-V3, 5 us at 3.3 TB/s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.kv_cache import cell_pointers, heads_of_program, store_latent
from moeflow.kernels.triton.launching import gpu_of, launch
from moeflow.kernels.triton.rotation import inverse_rms, partner, rotated, source, weighted

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.attention.kv_blocks import KVBlocks
    from moeflow.kernels.attention.latent_heads import LatentHeads
    from moeflow.kernels.rotary import RotaryTable

_MOST_ABSORBED: Final = 64  # tokens whose products are part of the launch; for more, libraries are faster
_TOKENS: Final = 16  # the fewest rows that tensor cores take
_COLUMNS: Final = 64


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
def absorb(
    place,
    q_ptr,
    up_ptr,
    queries_ptr,
    num_tokens,
    num_heads,
    q_stride,
    up_stride,
    nope_dim,
    rope_dim,
    latent_dim,
    block_nope: tl.constexpr,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Store the products of all tokens' queries and some columns of a head's projection; shapes as below."""
    num_parts = tl.cdiv(latent_dim, block_columns)
    head = (place // num_parts).to(tl.int64)
    columns = place % num_parts * block_columns + tl.arange(0, block_columns)[None, :]
    dims = tl.arange(0, block_nope)
    is_dim, is_column = dims < nope_dim, columns < latent_dim
    places = up_ptr + head * up_stride + dims[:, None] * latent_dim + columns
    weights = tl.load(places, mask=is_dim[:, None] & is_column, other=0.0)
    for first in range(0, num_tokens, block_tokens):
        tokens = (first + tl.arange(0, block_tokens)).to(tl.int64)[:, None]
        is_token = tokens < num_tokens
        queries = q_ptr + tokens * q_stride + head * (nope_dim + rope_dim) + dims[None, :]
        q = tl.load(queries, mask=is_token & is_dim[None, :], other=0.0)
        out = tl.dot(q, weights, input_precision="ieee").to(queries_ptr.dtype.element_ty)
        outputs = queries_ptr + (tokens * num_heads + head) * (latent_dim + rope_dim) + columns
        tl.store(outputs, out, mask=is_token & is_column)


@triton.jit
def latent_input_kernel(
    q_ptr,
    kept_ptr,
    up_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    queries_ptr,
    cells_ptr,
    scales_ptr,
    num_tokens,
    q_stride,
    kept_stride,
    up_stride,
    num_heads,
    nope_dim,
    rope_dim,
    latent_dim,
    eps,
    is_interleaved: tl.constexpr,
    block_size: tl.constexpr,
    is_int8: tl.constexpr,
    is_absorbed: tl.constexpr,
    block_heads: tl.constexpr,
    block_rope: tl.constexpr,
    block_latent: tl.constexpr,
    block_nope: tl.constexpr,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Rotate some heads' queries of a token, or store its key, which a token's last program does.

    Programs after these are those of `absorb`. Shapes: q [T, H, N + R], kept [T, L + R], up [H, N, L], heads
    `up_stride` apart; norm [L], cos and sin [T, 1, R], slots [T], queries [T, H, L + R].
    """
    num_tiles = tl.cdiv(num_heads, block_heads) + 1
    if is_absorbed:
        place = tl.program_id(0) - num_tokens * num_tiles
        if place >= 0:
            absorb(
                place,
                q_ptr,
                up_ptr,
                queries_ptr,
                num_tokens,
                num_heads,
                q_stride,
                up_stride,
                nope_dim,
                rope_dim,
                latent_dim,
                block_nope,
                block_tokens,
                block_columns,
            )
            return
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    key_dim = latent_dim + rope_dim
    cos_ptr += token * rope_dim
    sin_ptr += token * rope_dim
    dims = tl.arange(0, block_rope)[None, :]
    if tile < num_tiles - 1:
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
    q: Tensor, kept: Tensor, up: Tensor, heads: LatentHeads, rotary: RotaryTable, blocks: KVBlocks, slots: Tensor
) -> Tensor:
    """Store latents and rotary keys where slots are not negative, and return queries of latents and rotary keys.

    Launches: 1 for up to 64 tokens, else 2. Rows of q and kept may lie apart.
    Shapes: q [T, H * (N + R)], kept [T, L + R], up [H, N + V, L], slots [T] int64 -> [T, H, L + R].
    """
    num_tokens, num_heads = len(q), heads.num_heads
    queries = torch.empty(num_tokens, num_heads, heads.key_dim, dtype=q.dtype, device=q.device)
    block_rope = triton.next_power_of_2(heads.rope_dim)
    block_heads = heads_of_program(num_heads, block_rope)
    num_prepared = num_tokens * (triton.cdiv(num_heads, block_heads) + 1)
    is_absorbed = num_tokens <= _MOST_ABSORBED and gpu_of(q).capability >= 80
    num_absorbed = num_heads * triton.cdiv(heads.latent_dim, _COLUMNS) if is_absorbed else 0
    launch(
        latent_input_kernel,
        (num_prepared + num_absorbed,),
        q,
        kept,
        up,
        heads.latent_norm.weight,
        rotary.cos,
        rotary.sin,
        slots,
        queries,
        *cell_pointers(blocks),
        num_tokens,
        q.stride(0),
        kept.stride(0),
        up.stride(0),
        num_heads,
        heads.nope_dim,
        heads.rope_dim,
        heads.latent_dim,
        heads.latent_norm.eps,
        is_interleaved=heads.is_interleaved,
        block_size=blocks.block_size,
        is_int8=blocks.dtype == "int8",
        is_absorbed=is_absorbed,
        block_heads=block_heads,
        block_rope=block_rope,
        block_latent=triton.next_power_of_2(heads.latent_dim),
        block_nope=max(triton.next_power_of_2(heads.nope_dim), 16),
        block_tokens=_TOKENS,
        block_columns=_COLUMNS,
        num_warps=4 if is_absorbed else 1,
        enable_fp_fusion=False,  # products are rounded before sums, as in the reference
    )
    if not is_absorbed:
        nope = q.view(num_tokens, num_heads, heads.query_dim)[..., : heads.nope_dim]
        multiply_heads(nope, up[:, : heads.nope_dim], queries[..., : heads.latent_dim])
    return queries


def multiply_heads(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """Write each head's product, without copies. Shapes: x [T, H, n], matrices [H, n, m], out [T, H, m]."""
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
