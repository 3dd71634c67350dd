"""Attention whose values are normalised for each head, without weights; they may be what keys are made of, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.rotary import RotaryTable
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.token_mixer import in_order
from moeflow.models.layers.weight_allocator import WeightAllocator

if TYPE_CHECKING:
    from torch import Tensor


class NormedValues(Attention):
    """The attention of one layer, `attention(norm(q), norm(k), norm(v))`."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> None:
        super().__init__(config, allocator, layer_idx, qk_norm="per_head")
        sizes = config.attention.heads_of(layer_idx)
        if sizes.has_keys:
            self.heads = replace(self.heads, v_norm=allocator.ones(self.heads.head_dim))
        self._values_are_keys = sizes.values_are_keys and sizes.has_keys

    @property
    def order(self) -> Sequence[range]:
        """Queries, keys and values, which may lie where keys do."""
        heads = self.heads
        keys_at, size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        keys = range(keys_at, keys_at + size)
        return [range(keys_at), keys, keys] if self._values_are_keys else []

    def store(
        self, blocks: KVBlocks, qkv: Tensor, rotary: Sequence[RotaryTable], metadata: AttentionMetadata
    ) -> Tensor:
        """See `Attention`. Shapes: qkv [T, (Q + 2 KV) * D], or without values [T, (Q + KV) * D] -> [T, Q, D]."""
        return super().store(blocks, in_order(qkv, self.order), rotary, metadata)
