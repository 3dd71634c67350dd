"""Everything between the QKV projection and attention: norms, clipping, rotation, and storing K and V."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.attention.attention import write_kv
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.heads import Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.cpu import row_ops
from moeflow.kernels.norm import rms_norm
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.rotary import RotaryTable, apply_rotary
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels.triton import attention_input as triton_attention_input


def attention_input(
    qkv: Tensor, heads: Heads, rotary: RotaryTable | None, blocks: KVBlocks, metadata: AttentionMetadata
) -> Tensor:
    """Prepare queries, keys and values as `heads` says, store K and V of all tokens, and return the queries.

    Without `rotary` nothing is rotated, and without keys nothing is stored.
    Shapes: qkv [T, (Q + 2 KV) * D], or [T, Q * D] without keys, which may be overwritten; its rows may lie apart ->
    [T, Q, D].
    """
    if launching.accepts(qkv):
        return triton_attention_input.attention_input(qkv, heads, rotary, blocks, metadata.slots)
    qkv = qkv.contiguous()
    if blocks.handle is not None and row_ops.accepts(qkv):
        return row_ops.attention_input(qkv, heads, rotary, blocks, metadata.slots)
    num_keys = heads.num_kv_heads if heads.has_keys else 0
    num_rotated = heads.num_heads + num_keys
    sizes = [num_rotated * heads.head_dim, num_keys * heads.head_dim]
    qk, v = torch.split(qkv, sizes, dim=-1)
    if not heads.norms_last:
        qk = _normalise(qk, heads)
    if heads.v_norm is not None and heads.has_keys:
        v = rms_norm(v.reshape(len(v), heads.num_kv_heads, heads.head_dim), heads.v_norm, heads.eps).flatten(1)
    if heads.clip is not None:
        qk, v = qk.clamp(-heads.clip, heads.clip), v.clamp(-heads.clip, heads.clip)
    qk = qk.view(len(qk), num_rotated, heads.head_dim)
    if rotary is not None:
        qk = apply_rotary(_split_pairs(qk, rotary.dim) if heads.is_interleaved else qk, rotary.cos, rotary.sin)
    if heads.norms_last:
        qk = _normalise(qk.flatten(1), heads).view(qk.shape)
    q, k = torch.split(qk, [heads.num_heads, num_keys], dim=1)
    if not heads.has_keys:
        return q
    write_kv(k, v.view(len(v), heads.num_kv_heads, heads.head_dim), blocks, metadata.slots)
    return q


def _split_pairs(qk: Tensor, size: int) -> Tensor:
    """Put the first of each pair of neighbours before the second of each; products of queries and keys stay the same.

    Shapes: qk [T, Q + KV, D] -> the same. The first `dims` dimensions are reordered.
    """
    return torch.cat([qk[..., 0:size:2], qk[..., 1:size:2], qk[..., size:]], dim=-1)


def _normalise(qk: Tensor, heads: Heads) -> Tensor:
    """Apply norms, if there are some. Shapes: qk [T, (Q + KV) * D], or [T, Q * D] -> the same."""
    if heads.q_norm is None and heads.k_norm is None:
        return qk
    q_size = heads.num_heads * heads.head_dim
    parts = []
    queries, keys = torch.split(qk, [q_size, qk.shape[1] - q_size], dim=-1)
    for x, norm in ((queries, heads.q_norm), (keys, heads.k_norm)):
        if norm is None:
            parts.append(x)
            continue
        size = norm.numel()
        parts.append(rms_norm(x.reshape(len(x), x.shape[1] // size, size), norm, heads.eps).flatten(1))
    return torch.cat(parts, dim=-1)
