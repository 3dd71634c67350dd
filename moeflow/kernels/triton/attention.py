"""Paged attention: split-KV partial results, then their sum. The reference is `kernels/attention/attention.py`.

The G query heads that share a KV head are rows of one tile: row token * G + head of a sequence. A tile multiplies its
rows by tiles of keys and values on tensor cores and keeps a running softmax (FlashAttention-2, 2307.08691, section
3.1). If a pass has few tiles, programs share the positions of a sequence (Flash-Decoding). A second kernel adds their
partial results in the order of positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.attention_kernels import attention_kernel, combine_kernel
from moeflow.kernels.triton.attention_tiles import fits, num_splits_of, tile_of
from moeflow.kernels.triton.gates import sigmoid_gate
from moeflow.kernels.triton.launching import gpu_of, launch

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.attention.attention_metadata import AttentionMetadata
    from moeflow.kernels.attention.device_table import DeviceTable

_MOST_COMBINED_DIMS = 128  # of one program, so that up to 64 partial results fit its registers


def takes(q: Tensor, blocks: KVBlocks, metadata: AttentionMetadata, scores: Scores) -> bool:
    """Return whether the kernels compute this: no encoder-decoder, and tiles that the GPU's shared memory holds."""
    return metadata.lengths is None and scores.bias is None and fits(gpu_of(q), blocks.value_dim)


def attend(q: Tensor, blocks: KVBlocks, table: DeviceTable, scores: Scores, gates: Tensor | None = None) -> Tensor:
    """Attend over each token's sequence; rows of tokens without a sequence become zero.

    Launches: 2 with shared sequences or with gates, else 1. Shapes: q [T, Q, D], gates [T, Q * value_dim], whose rows
    may lie apart -> [T, Q * value_dim].
    """
    if q.stride(2) != 1:
        q = q.contiguous()
    num_tokens, num_heads, head_dim = q.shape
    value_dim, num_kv_heads = blocks.value_dim, blocks.num_kv_heads
    group = num_heads // num_kv_heads
    gpu = gpu_of(q)
    tile = tile_of(gpu, num_rows=table.max_tokens * group, value_dim=value_dim, dtype=q.dtype)
    num_tiles = triton.cdiv(table.max_tokens * group, tile.rows)
    num_splits = num_splits_of(gpu, num_tiles * num_kv_heads * table.num_sequences)
    is_split = num_splits > 1
    make_out = torch.empty if is_split else torch.zeros
    out = make_out((num_tokens, num_heads * value_dim), dtype=q.dtype, device=q.device)
    sums, stats = out, out  # not read
    if is_split:
        sums = torch.empty((num_tokens, num_heads, num_splits, value_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((2, num_tokens, num_heads, num_splits), dtype=torch.float32, device=q.device)
    key_scales, value_scales = blocks.key_scales, blocks.value_scales
    has_scales = key_scales is not None and value_scales is not None
    shared = {
        "window": scores.sliding_window or 0,
        "num_splits": num_splits,
        "has_window": scores.sliding_window is not None,
        "has_trees": table.tree_masks is not None,
        "tile_tokens": tile.tokens,
    }
    launch(
        attention_kernel,
        (num_tiles, num_kv_heads * num_splits, table.num_sequences),
        q,
        blocks.keys,
        blocks.values,
        key_scales if has_scales else q,
        value_scales if has_scales else q,
        table.sequences,
        table.block_ids,
        table.sequences if table.tree_masks is None else table.tree_masks,
        q if scores.sinks is None else scores.sinks,
        out,
        sums,
        stats,
        q.stride(0),
        q.stride(1),
        blocks.keys.stride(0),
        blocks.keys.stride(1),
        0 if key_scales is None else key_scales.stride(0),
        0 if key_scales is None else key_scales.stride(1),
        num_tokens,
        head_dim**-0.5 if scores.scale is None else scores.scale,
        scores.soft_cap or 0.0,
        **shared,
        has_scales=has_scales,
        has_sinks=scores.sinks is not None,
        has_soft_cap=scores.soft_cap is not None,
        is_split=is_split,
        group=group,
        head_dim=head_dim,
        latent_dim=blocks.latent_dim,
        block_size=blocks.block_size,
        run=min(blocks.block_size & -blocks.block_size, tile.tokens),
        tile_rows=tile.rows,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if is_split:
        part = min(triton.next_power_of_2(value_dim), _MOST_COMBINED_DIMS)
        launch(
            combine_kernel,
            (num_tokens, num_heads, triton.cdiv(value_dim, part)),
            sums,
            stats,
            out,
            table.sequences,
            out if gates is None else gates,
            0 if gates is None else gates.stride(0),
            table.num_sequences,
            **shared,
            has_gates=gates is not None,
            value_dim=value_dim,
            part_dims=part,
            most_splits=triton.next_power_of_2(num_splits),
            most_sequences=triton.next_power_of_2(table.num_sequences),
            num_warps=4,
        )
    elif gates is not None:
        return sigmoid_gate(out, gates)
    return out
