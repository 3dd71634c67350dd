"""Paged attention in plain torch: prefill chunks and decodes of many sequences in one pass.

K and V of all tokens of the pass go to the cache first, so that a sequence may read blocks which another one of
the same pass writes. Then each prefill chunk is one attention call, and decodes share one call per group of
similar context length, padded and masked. Grouped-query heads share their K and V without copies.
Cached values must be finite: masked positions are multiplied by zero, not skipped.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from moeflow.kernels.attention_metadata import AttentionMetadata, DecodeGroup, PrefillChunk

__all__ = ["AttentionMetadata", "paged_attention"]


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, kv_blocks: Tensor, metadata: AttentionMetadata, *, sliding_window: int | None
) -> Tensor:
    """Store k and v in the cache, then attend causally over each token's sequence; scores are scaled by D^-0.5.

    `sliding_window` is the number of tokens a query sees, itself included; None: all before it.

    Shapes: q [T, Q, D], k and v [T, KV, D], kv_blocks [B, block_size, 2, KV, D] (written) -> [T, Q * D].
    """
    rows = kv_blocks.flatten(0, 1)
    rows[:, 0].index_copy_(0, metadata.slots, k)
    rows[:, 1].index_copy_(0, metadata.slots, v)
    plan = metadata.plan(sliding_window, q.dtype)
    if plan.is_one_group:
        return _decode(q, kv_blocks, plan.groups[0]).flatten(1)
    out = q.new_empty(q.shape)
    for chunk in plan.chunks:
        out[chunk.tokens] = _prefill(q[chunk.tokens], k, v, kv_blocks, chunk)
    for group in plan.groups:
        out.index_copy_(0, group.rows, _decode(q.index_select(0, group.rows), kv_blocks, group))
    return out.flatten(1)


def _decode(q: Tensor, kv_blocks: Tensor, group: DecodeGroup) -> Tensor:
    """Attend from one query per sequence: q [R, Q, D] -> [R, Q, D]."""
    num_rows, num_heads, head_dim = q.shape
    keys, values = _gather(kv_blocks, group.blocks, num_rows, group.length)
    # The heads that share K and V become the query dimension: they all see the same positions.
    q = q.view(num_rows, keys.shape[1], -1, head_dim)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask)
    return out.reshape(num_rows, num_heads, head_dim)


def _prefill(q: Tensor, k: Tensor, v: Tensor, kv_blocks: Tensor, chunk: PrefillChunk) -> Tensor:
    """Attend from the tokens of one sequence: q [n, Q, D] -> [n, Q, D]."""
    if chunk.blocks is None:  # nothing before this chunk: its own K and V are all there is
        keys = k[chunk.tokens].transpose(0, 1).unsqueeze(0)
        values = v[chunk.tokens].transpose(0, 1).unsqueeze(0)
    else:
        keys, values = _gather(kv_blocks, chunk.blocks, 1, chunk.length)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)


def _gather(kv_blocks: Tensor, blocks: Tensor, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return K and V [R, KV, length, D] out of whole blocks; blocks [R * blocks per row]."""
    kv = kv_blocks.index_select(0, blocks).view(num_rows, -1, *kv_blocks.shape[2:])[:, :length]
    keys, values = kv.permute(2, 0, 3, 1, 4).unbind(0)
    return keys, values
