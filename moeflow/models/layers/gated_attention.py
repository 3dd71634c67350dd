"""Attention with a gated result: each query has as many gate values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeflow.core.attention_config import HeadSizes
from moeflow.kernels.attention.attention import attend
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.cpu.packed_layer import PackedAttention
from moeflow.kernels.rotary import RotaryTable
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.token_mixer import in_order

if TYPE_CHECKING:
    from torch import Tensor


class GatedAttention(Attention):
    """The attention of one layer, `attention(q, k, v) * sigmoid(gate)`; in `q_proj` a head's gate follows its query."""

    rows_per_query = 2

    def _order_of(self, num_heads: int, num_kv_heads: int, sizes: HeadSizes) -> Sequence[range]:
        """See `Attention`. Gates come last."""
        dim, num_rows = sizes.head_dim, 2 * (num_heads + num_kv_heads) * sizes.head_dim
        parts = [range(start, start + dim) for start in range(0, 2 * num_heads * dim, dim)]
        return [*parts[::2], range(2 * num_heads * dim, num_rows), *parts[1::2]]

    def attend_over(
        self, blocks: KVBlocks, qkv: Tensor, rotary: Sequence[RotaryTable], metadata: AttentionMetadata
    ) -> Tensor:
        """See `Attention`. Shapes: qkv [T, (2 Q + 2 KV) * D] -> [T, Q * D]."""
        ordered, size = in_order(qkv, self.order), self.heads.row_size
        q = self.store_ordered(blocks, ordered[:, :size], rotary, metadata)
        return attend(q, blocks, metadata, self.scores, ordered[:, size:])

    def for_kernels(self) -> PackedAttention:
        """See `TokenMixer`."""
        return PackedAttention(self.heads, self.scores, self.rotary, is_gated=True)
