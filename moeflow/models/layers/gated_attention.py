"""Attention with a gated result: each query has as many gate values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeflow.kernels.cpu.packed_layer import PackedAttention
from moeflow.kernels.recurrent.gates import sigmoid_gate
from moeflow.kernels.rotary import RotaryTable
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.token_mixer import in_order

if TYPE_CHECKING:
    from torch import Tensor


class GatedAttention(Attention):
    """The attention of one layer, `attention(q, k, v) * sigmoid(gate)`; in `q_proj` a head's gate follows its query."""

    rows_per_query = 2

    @property
    def order(self) -> list[range]:
        """Queries, keys, values and gates."""
        heads = self.heads
        dim, num_rows = heads.head_dim, 2 * (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        parts = [range(start, start + dim) for start in range(0, 2 * heads.num_heads * dim, dim)]
        return [*parts[::2], range(2 * heads.num_heads * dim, num_rows), *parts[1::2]]

    def mix(self, qkv: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """See `TokenMixer`. Shapes: qkv [T, (2 Q + 2 KV) * D] -> [T, Q * D]."""
        size = self.heads.num_heads * self.heads.head_dim
        ordered = in_order(qkv, self.order)
        attended = super().mix(ordered[:, :-size].contiguous(), rotary, context)
        return sigmoid_gate(attended, ordered[:, -size:])

    def for_kernels(self) -> PackedAttention:
        """See `TokenMixer`."""
        return PackedAttention(self.heads, self.scores, self.rotary, is_gated=True)
