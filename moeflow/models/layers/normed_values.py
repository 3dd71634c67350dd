"""Attention whose values are normalised for each head, without weights; they may be what keys are made of, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.norm import normalise
from moeflow.kernels.on_demand import torch
from moeflow.kernels.rotary import RotaryTable
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.norm import Norm
from moeflow.models.layers.weight_allocator import WeightAllocator

if TYPE_CHECKING:
    from torch import Tensor


class NormedValues(Attention):
    """The attention of one layer, `attention(norm(q), norm(k), norm(v))`."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> None:
        super().__init__(config, allocator, layer_idx, qk_norm="per_head")
        self._norm = Norm(allocator, self.heads.head_dim, config.rms_norm_eps, has_weight=False)
        self._values_are_keys = config.heads_of(layer_idx).values_are_keys

    def for_kernels(self) -> None:
        """See `TokenMixer`: they cannot."""

    def mix(self, qkv: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """See `TokenMixer`. Shapes: qkv [T, (Q + 2 KV) * D], or without values [T, (Q + KV) * D] -> [T, Q * D]."""
        num_tokens, size = qkv.shape[0], self.heads.num_kv_heads * self.heads.head_dim
        raw = qkv[:, -size:].contiguous().view(num_tokens, self.heads.num_kv_heads, self.heads.head_dim)
        values: Tensor = normalise(raw, self._norm.weights)
        queries_and_keys = qkv if self._values_are_keys else qkv[:, :-size]
        return super().mix(torch.cat([queries_and_keys, values.view(num_tokens, size)], dim=1), rotary, context)
