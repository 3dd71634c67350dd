"""Latent attention (MLA): of a token one latent and one rotary key are kept for all heads.

A head's keys and values are up-projections of the latent. They are never materialized. The query is multiplied by the
projection of keys, so it attends to the latents themselves. The result, a latent, is multiplied by the projection of
values.
That is attention of all heads over one KV head, whose key is latent and rotary key, and whose value is the latent.
For a long prompt this takes more arithmetic than keys and values of each head (DeepSeek-V3's widths: 1088 products per
head and position instead of 320). With one form for all, a token's bits do not depend on the chunks of a prompt.

Source: DeepSeek-V2 (2405.04434), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.attention.attention import attend, write_kv
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.attention.latent_heads import LatentHeads
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.norm import normalise
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.rotary import RotaryTable, apply_rotary
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels.triton import latent_input


def attend_to_latents(
    q: Tensor,
    kept: Tensor,
    up: Tensor,
    heads: LatentHeads,
    rotary: RotaryTable,
    blocks: KVBlocks,
    metadata: AttentionMetadata,
    scores: Scores,
) -> Tensor:
    """Store the latent and rotary key of each token, and attend.

    A GPU takes one kernel before attention, and a product behind it.


    Shapes: q [T, H * (N + R)], kept [T, L + R], up [H, N + V, L], keys before values -> [T, H * V].
    """
    if launching.accepts(kept):
        return _attend_on_gpu(q, kept, up, heads, rotary, blocks, metadata, scores)
    latents, rotary_keys = torch.split(kept, [heads.latent_dim, heads.rope_dim], dim=-1)
    latents = normalise(latents.contiguous(), heads.latent_norm)
    keys = torch.cat([latents[:, None], rotated(rotary_keys[:, None], heads, rotary)], dim=-1)
    write_kv(keys, None, blocks, metadata.slots)
    q = q.view(len(q), heads.num_heads, heads.query_dim)
    nope, rope = torch.split(q, [heads.nope_dim, heads.rope_dim], dim=-1)
    to_keys, to_values = torch.split(up, [heads.nope_dim, heads.value_dim], dim=1)
    queries = torch.cat([torch.einsum("thn,hnl->thl", nope, to_keys), rotated(rope, heads, rotary)], dim=-1)
    attended = attend(queries, blocks, metadata, scores).view(len(q), heads.num_heads, heads.latent_dim)
    return torch.einsum("thl,hvl->thv", attended, to_values).flatten(1)


def _attend_on_gpu(
    q: Tensor,
    kept: Tensor,
    up: Tensor,
    heads: LatentHeads,
    rotary: RotaryTable,
    blocks: KVBlocks,
    metadata: AttentionMetadata,
    scores: Scores,
) -> Tensor:
    queries = latent_input.latent_input(q, kept, up, heads, rotary, blocks, metadata.slots)
    attended = attend(queries, blocks, metadata, scores).view(len(q), heads.num_heads, heads.latent_dim)
    out = q.new_empty(len(q), heads.num_heads, heads.value_dim)
    latent_input.multiply_heads(attended, up[:, heads.nope_dim :].transpose(1, 2), out)
    return out.flatten(1)


def rotated(x: Tensor, heads: LatentHeads, rotary: RotaryTable) -> Tensor:
    """Return x rotated; the halves of the result have the first and second neighbours. Shapes: x [T, heads, R]."""
    if heads.is_interleaved:
        x = x.view(*x.shape[:-1], heads.rope_dim // 2, 2).transpose(-1, -2).flatten(-2)
    return apply_rotary(x, rotary.cos, rotary.sin)
