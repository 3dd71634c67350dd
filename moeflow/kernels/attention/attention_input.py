"""Everything between the QKV projection and attention: norms, clipping, rotation, and storing K and V."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.attention.attention import write_kv
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.heads import Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.cpu import row_ops
from moeflow.kernels.norm import rms_norm
from moeflow.kernels.on_demand import torch
from moeflow.kernels.rotary import RotaryTable, apply_rotary

if TYPE_CHECKING:
    from torch import Tensor


def attention_input(
    qkv: Tensor, heads: Heads, rotary: RotaryTable | None, blocks: KVBlocks, metadata: AttentionMetadata
) -> Tensor:
    """Prepare queries, keys and values as `heads` says, store K and V of all tokens, and return the queries.

    Without `rotary` nothing is rotated. Shapes: qkv [T, (Q + 2 KV) * D], which may be overwritten -> [T, Q, D].
    """
    if blocks.handle is not None and row_ops.accepts(qkv):
        return row_ops.attention_input(qkv, heads, rotary, blocks, metadata.slots)
    num_rotated = heads.num_heads + heads.num_kv_heads
    sizes = [num_rotated * heads.head_dim, heads.num_kv_heads * heads.head_dim]
    qk, v = torch.split(qkv, sizes, dim=-1)
    if heads.q_norm is not None and heads.k_norm is not None:
        qk = _normalise(qk, heads, heads.q_norm, heads.k_norm)
    if heads.clip is not None:
        qk, v = qk.clamp(-heads.clip, heads.clip), v.clamp(-heads.clip, heads.clip)
    qk = qk.view(len(qk), num_rotated, heads.head_dim)
    qk = qk if rotary is None else apply_rotary(qk, rotary.cos, rotary.sin)
    q, k = torch.split(qk, [heads.num_heads, heads.num_kv_heads], dim=1)
    write_kv(k, v.view(len(v), heads.num_kv_heads, heads.head_dim), blocks, metadata.slots)
    return q


def _normalise(qk: Tensor, heads: Heads, q_norm: Tensor, k_norm: Tensor) -> Tensor:
    """Shapes: qk [T, (Q + KV) * D] -> the same."""
    q, k = torch.split(qk, [heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim], dim=-1)
    parts = []
    for x, norm in ((q, q_norm), (k, k_norm)):
        size = norm.numel()
        parts.append(rms_norm(x.view(len(x), x.shape[1] // size, size), norm, heads.eps).flatten(1))
    return torch.cat(parts, dim=-1)
