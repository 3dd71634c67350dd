"""Paged attention: prefill chunks and decodes of many sequences in one pass.

K and V of all tokens of the pass go to the cache first, so that a sequence may read blocks which another one of
the same pass writes. What the CPU extension takes is done by it; what is here in plain torch runs on any device, and
is what the extension is tested against. There each prefill chunk is one attention call, and decodes share one call
per group of similar context length, padded and masked. Grouped-query heads share their K and V without copies.
Cached values must be finite for it: masked positions are multiplied by zero, not skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.attention.attention_metadata import AttentionMetadata, DecodeGroup, PrefillChunk
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.cpu import attention as cpu_attention
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


def write_kv(k: Tensor, v: Tensor, blocks: KVBlocks, slots: Tensor) -> None:
    """Store K and V of tokens. Shapes: k and v [T, KV, D], slots [T] int64: block * block_size + offset."""
    if cpu_attention.fits(k, blocks) and cpu_attention.fits(v, blocks):
        cpu_attention.write_kv(k, v, blocks, slots)
    else:
        blocks.write(slots, k, v)


def attend(
    q: Tensor,
    blocks: KVBlocks,
    metadata: AttentionMetadata,
    *,
    sliding_window: int | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend over each token's sequence, whose K and V are in the cache; the metadata say what a token sees of it.

    `sliding_window` is the number of tokens a query sees, itself included; None: all before it. Scores are multiplied
    by `scale`, None: D^-0.5; then `bias` is added by how far the key lies behind the query, from -R to R, and what
    is further away counts as R (the relative positions of T5). Neither a window nor trees go with a bias or `lengths`.

    Shapes: q [T, Q, D], bias [Q, 2R + 1] float32 -> [T, Q * D].
    """
    if cpu_attention.fits(q, blocks):
        return cpu_attention.attend(q, blocks, metadata, sliding_window, scale, bias)
    return attend_reference(q, blocks, metadata, sliding_window=sliding_window, scale=scale, bias=bias)


def attend_reference(
    q: Tensor,
    blocks: KVBlocks,
    metadata: AttentionMetadata,
    *,
    sliding_window: int | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Do the same in plain torch."""
    if metadata.lengths is not None or bias is not None:
        return _attend_by_sequence(q, blocks, metadata, scale, bias)
    assert scale is None, "scores have another scale where positions are relative, only"
    plan = metadata.plan(sliding_window, q.dtype)
    if plan.is_one_group:
        return _decode(q, blocks, plan.groups[0]).flatten(1)
    out = q.new_empty(q.shape)
    for chunk in plan.chunks:
        out[chunk.tokens] = _prefill(q[chunk.tokens], blocks, chunk)
    for group in plan.groups:
        out.index_copy_(0, group.rows, _decode(q.index_select(0, group.rows), blocks, group))
    return out.flatten(1)


def _attend_by_sequence(
    q: Tensor, blocks: KVBlocks, metadata: AttentionMetadata, scale: float | None, bias: Tensor | None
) -> Tensor:
    out = q.new_empty(q.shape)
    lengths = metadata.lengths or [None] * len(metadata.spans)
    for span, length in zip(metadata.spans, lengths, strict=True):
        tokens = slice(span.first_token, span.first_token + span.num_tokens)
        block_ids = torch.tensor(span.block_ids, dtype=torch.int64, device=q.device)
        num_seen = span.stop if length is None else length
        keys, values = (half[None, :, :num_seen] for half in blocks.read(block_ids, q.dtype))
        distances = (
            torch.arange(num_seen, device=q.device) - torch.arange(span.start, span.stop, device=q.device)[:, None]
        )
        mask = torch.zeros(distances.shape, dtype=q.dtype, device=q.device)
        if bias is not None:
            reach = bias.shape[1] // 2
            mask = bias[:, distances.clamp(-reach, reach) + reach].to(q.dtype)
        if length is None:
            mask = mask.masked_fill(distances > 0, -torch.inf)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[tokens].transpose(0, 1)[None], keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[tokens] = attended[0].transpose(0, 1)
    return out.flatten(1)


def _decode(q: Tensor, blocks: KVBlocks, group: DecodeGroup) -> Tensor:
    """Attend from one query per sequence: q [R, Q, D] -> [R, Q, D]."""
    num_rows, num_heads, head_dim = q.shape
    keys, values = (
        half.view(len(half), num_rows, -1, head_dim).transpose(0, 1)[:, :, : group.length]
        for half in blocks.read(group.blocks, q.dtype)
    )
    # The heads that share K and V become the query dimension: they all see the same positions.
    q = q.reshape(num_rows, keys.shape[1], -1, head_dim)
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask)
    return out.reshape(num_rows, num_heads, head_dim)


def _prefill(q: Tensor, blocks: KVBlocks, chunk: PrefillChunk) -> Tensor:
    """Attend from the tokens of one sequence: q [n, Q, D] -> [n, Q, D]."""
    keys, values = (half[None, :, : chunk.length] for half in blocks.read(chunk.blocks, q.dtype))
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)
