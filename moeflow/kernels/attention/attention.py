"""Paged attention: prefill chunks and decodes of many sequences in one pass.

K and V of all tokens of the pass are stored first: a sequence may read blocks that another one of the same pass writes.
The CPU extension and the Triton kernels compute the inputs that they support. The plain torch code here runs on any
device, and tests compare both with it. There each prefill chunk is one attention call, and decodes share one call
per group of similar context length, padded and masked. Grouped-query heads share their K and V without copies.
Cached values must be finite for it: masked positions are multiplied by zero, not skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.attention.attention_metadata import AttentionMetadata, DecodeGroup, PrefillChunk
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.attention.scores import PLAIN, Scores
from moeflow.kernels.cpu import attention as cpu_attention
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.arrays import Array

with on_demand(__name__):
    from moeflow.kernels.recurrent import gates as gate_kernels
    from moeflow.kernels.triton import attention as triton_attention
    from moeflow.kernels.triton import kv_cache, kv_moves


def write_kv(k: Tensor, v: Tensor | None, blocks: KVBlocks, slots: Tensor) -> None:
    """Store K and V of tokens, or K alone where values are a part of it.

    Shapes: k and v [T, KV, D], slots [T] int64: block * block_size + offset.
    """
    if cpu_attention.fits(k, blocks) and (v is None or cpu_attention.fits(v, blocks)):
        cpu_attention.write_kv(k, v, blocks, slots)
    elif launching.accepts(k):
        kv_cache.write_kv(k, v, blocks, slots)
    else:
        blocks.write(slots, k, v)


def move_kv(blocks: KVBlocks, from_slots: Array, to_slots: Array) -> None:
    """Copy K and V of tokens to other slots, one after another. Shapes: [n] int64."""
    if launching.accepts(from_slots):
        kv_moves.move_kv(blocks, from_slots, to_slots)
    else:
        blocks.move(from_slots, to_slots)


def attend(
    q: Tensor, blocks: KVBlocks, metadata: AttentionMetadata, scores: Scores = PLAIN, gates: Tensor | None = None
) -> Tensor:
    """Attend over each token's sequence, whose K and V are in the cache. The metadata define the visible tokens.

    Neither a window nor trees go with `metadata.lengths`.

    The result is multiplied by the sigmoid of `gates`, if there are some.

    Shapes: q [T, Q, D] -> [T, Q * D], or as wide as values are; gates likewise, rows may lie apart.
    """
    if launching.accepts(q) and triton_attention.takes(q, blocks, metadata, scores):
        return triton_attention.attend(q, blocks, metadata.device_table, scores, gates)
    if cpu_attention.fits(q, blocks):
        out = cpu_attention.attend(q, blocks, metadata, scores)
    else:
        out = attend_reference(q, blocks, metadata, scores)
    return out if gates is None else gate_kernels.sigmoid_gate(out, gates)


def attend_reference(q: Tensor, blocks: KVBlocks, metadata: AttentionMetadata, scores: Scores = PLAIN) -> Tensor:
    """Do the same in plain torch."""
    if metadata.lengths is not None or scores.bias is not None:
        return _attend_by_sequence(q, blocks, metadata, scores)
    plan = metadata.plan(scores.sliding_window, q.dtype)
    if plan.is_one_group:
        return _decode(q, blocks, plan.groups[0], scores).flatten(1)
    out = q.new_empty(*q.shape[:2], blocks.value_dim)
    for chunk in plan.chunks:
        out[chunk.tokens] = _prefill(q[chunk.tokens], blocks, chunk, scores)
    for group in plan.groups:
        out.index_copy_(0, group.rows, _decode(q.index_select(0, group.rows), blocks, group, scores))
    return out.flatten(1)


def _attend_by_sequence(q: Tensor, blocks: KVBlocks, metadata: AttentionMetadata, scores: Scores) -> Tensor:
    out, bias = q.new_empty(*q.shape[:2], blocks.value_dim), scores.bias
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
        attended = _weighted_values(q[tokens].transpose(0, 1)[None], keys, values, mask, scores)
        out[tokens] = attended[0].transpose(0, 1)
    return out.flatten(1)


def _decode(q: Tensor, blocks: KVBlocks, group: DecodeGroup, scores: Scores) -> Tensor:
    """Attend from one query per sequence: q [R, Q, D] -> [R, Q, value_dim]."""
    num_rows, num_heads, head_dim = q.shape
    keys, values = (
        half.view(len(half), num_rows, -1, half.shape[-1]).transpose(0, 1)[:, :, : group.length]
        for half in blocks.read(group.blocks, q.dtype)
    )
    if _is_plain(scores):
        # The heads that share K and V become the query dimension: they all see the same positions.
        q = q.reshape(num_rows, keys.shape[1], -1, head_dim)
        out = _weighted_values(q, keys, values, group.mask, scores)
    else:
        out = _weighted_values(q[:, :, None], keys, values, group.mask, scores)
    return out.reshape(num_rows, num_heads, blocks.value_dim)


def _prefill(q: Tensor, blocks: KVBlocks, chunk: PrefillChunk, scores: Scores) -> Tensor:
    """Attend from the tokens of one sequence: q [n, Q, D] -> [n, Q, value_dim]."""
    keys, values = (half[None, :, : chunk.length] for half in blocks.read(chunk.blocks, q.dtype))
    out = _weighted_values(q.transpose(0, 1).unsqueeze(0), keys, values, chunk.mask, scores, chunk.mask is None)
    return out.squeeze(0).transpose(0, 1)


def _is_plain(scores: Scores) -> bool:
    """Return whether torch's own attention takes them."""
    return scores.soft_cap is None and scores.sinks is None


def _weighted_values(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores, is_causal: bool = False
) -> Tensor:
    """Attend from all of q to what a mask leaves of all positions.

    Shapes: q [B, Q, n, D], keys [B, KV, S, D], values [B, KV, S, V], mask, added to scores, [.., n, S] -> [B, Q, n, V].
    """
    if _is_plain(scores):
        return torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=is_causal, scale=scores.scale, enable_gqa=True
        )
    share = q.shape[1] // keys.shape[1]
    keys, values = (half.repeat_interleave(share, dim=1) for half in (keys, values))
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    found = (q @ keys.transpose(2, 3)).float() * scale
    if scores.soft_cap is not None:
        found = torch.tanh(found / scores.soft_cap) * scores.soft_cap
    if is_causal:
        found = found.masked_fill(torch.ones_like(found, dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        found = found + mask
    if scores.sinks is not None:
        found = torch.cat([found, scores.sinks.float()[:, None, None].expand(*found.shape[:3], 1)], dim=-1)
    weights = found.softmax(dim=-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values
