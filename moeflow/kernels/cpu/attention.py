"""Paged attention by the CPU extension: one call per layer for prefill chunks and decodes.

A token's result is the same bits in any batch, for any chunks of its prompt and any number of threads (see
csrc/ops/attention.cpp).
"""

from __future__ import annotations

from moeflow.kernels.arrays import Array, address, floats_like, is_float32, row_stride
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.attention.scores import PLAIN, Scores
from moeflow.kernels.cpu.arguments import floats

try:
    import moeflow.kernels._cpu as _cpu
except ImportError:
    _cpu = None


def fits(x: Array, blocks: KVBlocks) -> bool:
    """Return whether the kernels take these blocks with queries (or keys and values) such as x [T, heads, D]."""
    return blocks.handle is not None and is_float32(x) and x.stride()[1:] == (blocks.head_dim, 1)


def write_kv(k: Array, v: Array | None, blocks: KVBlocks, slots: Array) -> None:
    """Store K and V of tokens, or K alone where values are a part of it.

    Shapes: k and v [T, KV, D], slots [T] int64.
    """
    assert (v is None) == (blocks.latent_dim > 0)
    _cpu.write_kv(
        cache=blocks.handle,
        num_tokens=len(slots),
        slots=address(slots),
        k=address(k),
        k_stride=row_stride(k),
        v=address(v),
        v_stride=0 if v is None else row_stride(v),
    )


def attend(q: Array, blocks: KVBlocks, metadata: AttentionMetadata, scores: Scores = PLAIN) -> Array:
    """Attend from each token to its visible tokens; see `kernels.attention.attention.attend`."""
    num_tokens, num_heads, _ = q.shape
    bias = scores.bias
    out = floats_like(q, num_tokens, num_heads * blocks.value_dim)
    _cpu.attention(
        cache=blocks.handle,
        q=address(q),
        q_stride=row_stride(q),
        num_heads=num_heads,
        num_sequences=len(metadata.spans),
        sequences=metadata.table.buffer_info()[0],
        sliding_window=scores.sliding_window or 0,
        tree_masks=address(metadata.tree_masks),
        out=address(out),
        scale=scores.scale or 0.0,
        soft_cap=scores.soft_cap or 0.0,
        sinks=floats(scores.sinks, num_heads),
        lengths=0 if metadata.lengths is None else metadata.lengths.buffer_info()[0],
        bias=0 if bias is None else floats(bias, num_heads, bias.shape[1]),
        bias_reach=0 if bias is None else bias.shape[1] // 2,
    )
    return out
