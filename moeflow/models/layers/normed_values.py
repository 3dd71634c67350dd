"""Attention whose values are normalised for each head, without weights; they may be what keys are made of, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeflow.core.attention_config import HeadSizes
from moeflow.core.model_config import ModelConfig
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.weight_allocator import WeightAllocator


class NormedValues(Attention):
    """The attention of one layer, `attention(norm(q), norm(k), norm(v))`."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> None:
        super().__init__(config, allocator, layer_idx, qk_norm="per_head")
        if self.heads.has_keys:
            self.heads = replace(self.heads, v_norm=allocator.ones(self.heads.head_dim))

    def _order_of(self, num_heads: int, num_kv_heads: int, sizes: HeadSizes) -> Sequence[range]:
        """See `Attention`. Values may lie where keys do."""
        keys_at = num_heads * sizes.head_dim
        keys = range(keys_at, keys_at + num_kv_heads * sizes.head_dim)
        return [range(keys_at), keys, keys] if sizes.values_are_keys and sizes.has_keys else ()
