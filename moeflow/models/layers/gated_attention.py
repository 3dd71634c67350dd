"""Attention whose result is gated: with each query come as many numbers that say how much of it is let through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeflow.kernels.on_demand import torch
from moeflow.kernels.recurrent.gates import sigmoid_gate
from moeflow.kernels.rotary import RotaryTable
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.context import ForwardContext

if TYPE_CHECKING:
    from torch import Tensor


class GatedAttention(Attention):
    """The attention of one layer, `attention(q, k, v) * sigmoid(gate)`; in `q_proj` a head's gate follows its query."""

    rows_per_query = 2

    def mix(self, qkv: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """See `TokenMixer`. Shapes: qkv [T, (2 Q + 2 KV) * D] -> [T, Q * D]."""
        heads = self.heads
        num_tokens, size = qkv.shape[0], heads.num_heads * heads.head_dim
        queries = qkv[:, : 2 * size].reshape(num_tokens, heads.num_heads, 2, heads.head_dim)
        keys_and_values = qkv[:, 2 * size :]
        gate = queries[:, :, 1].reshape(num_tokens, size)
        plain = torch.cat([queries[:, :, 0].reshape(num_tokens, size), keys_and_values], dim=1)
        return sigmoid_gate(super().mix(plain, rotary, context), gate)
