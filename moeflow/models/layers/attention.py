"""Grouped-query self-attention with rotary positions: projections on either side of the paged attention kernel.

Families differ in biases, in clipping and in whether queries and keys are normalised, per head or over all heads.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from moeflow.core.attention_config import HeadSizes
from moeflow.core.model_config import ModelConfig
from moeflow.kernels.attention.attention import attend
from moeflow.kernels.attention.attention_input import attention_input
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.heads import Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.cpu.packed_layer import PackedAttention
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.rotary import RotaryTable
from moeflow.models.layers.allocation.weight_formats import field_of
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.linear import Linear, output_linear
from moeflow.models.layers.token_mixer import in_order
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.parallel.blocks import head_blocks, scaled

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.models.layers.ranks import rank_heads

QKNorm = Literal["per_head", "all_heads", "per_rotated_head"]


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionNames:
    """A family's checkpoint names where families differ."""

    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"


class Attention:
    """The attention of one layer."""

    rows_per_query: ClassVar[int] = 1  # of `q_proj`, for each number of the queries

    def __init__(
        self,
        config: ModelConfig,
        allocator: WeightAllocator,
        layer_idx: int,
        qk_norm: QKNorm | None = None,
        names: AttentionNames = AttentionNames(),  # frozen
    ) -> None:
        """Take how queries and keys are normalised, and what checkpoints call these norms."""
        self.layer_idx = layer_idx
        self._names = names
        attention = config.attention
        kind = attention.of_layer(layer_idx)
        self.rotary = None if kind.rope is None else attention.ropes.index(kind.rope)  # which of a pass's tables
        sizes = attention.heads_of(layer_idx)
        q_size, kv_size = attention.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        key_parts = ("k_proj", "v_proj")[: sizes.num_key_projections]
        parts = {"q_proj": self.rows_per_query * q_size} | dict.fromkeys(key_parts, kv_size)
        self._kv_layer = layer_idx if sizes.kv_layer is None else sizes.kv_layer
        self._ranks = ranks = _rank_heads(config, allocator, sizes)
        num_heads = attention.num_heads if ranks is None else len(ranks.queries)
        num_kv_heads = sizes.num_kv_heads if ranks is None else len(ranks.keys)
        self.qkv_proj = Linear(
            allocator,
            config.hidden_size,
            parts,
            bias=attention.qkv_bias,
            own=None if ranks is None else _own_rows(ranks, parts, sizes.head_dim),
            order=self._order_of(num_heads, num_kv_heads, sizes),
        )
        self.o_proj = output_linear(
            allocator,
            q_size,
            names.out,
            config.hidden_size,
            bias=attention.out_bias,
            own=None if ranks is None else scaled(ranks.queries, sizes.head_dim),
        )
        self._gathers = ranks is not None and allocator.sums is None
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            per_head = qk_norm != "all_heads"
            self.q_norm = allocator.empty(sizes.head_dim if per_head else q_size)
            if sizes.has_keys:
                self.k_norm = allocator.empty(sizes.head_dim if per_head else kv_size)
        self._sinks = allocator.empty(attention.num_heads) if attention.has_sinks else None  # ranks have all
        self.scores = Scores(
            sliding_window=kind.sliding_window,
            scale=attention.score_scale,
            soft_cap=attention.score_soft_cap,
            sinks=self._sinks
            if self._sinks is None or ranks is None
            else self._sinks[ranks.queries.start : ranks.queries.stop],
        )
        self.is_normed_here = ranks is None or qk_norm != "all_heads"  # else before, with the other ranks
        self.heads = Heads(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=sizes.head_dim,
            q_norm=self.q_norm if self.is_normed_here else None,
            k_norm=self.k_norm if self.is_normed_here else None,
            eps=config.norms.eps,
            clip=attention.clip_qkv,
            norms_last=qk_norm == "per_rotated_head",
            has_keys=sizes.has_keys,
            is_interleaved=kind.rope is not None and kind.rope.is_interleaved,
        )

    @property
    def in_proj(self) -> Linear:
        """The projection of queries, keys and values."""
        return self.qkv_proj

    @property
    def out_proj(self) -> Linear:
        """The output projection."""
        return self.o_proj

    @property
    def order(self) -> Sequence[range]:
        """Queries, keys and values."""
        return self.qkv_proj.order

    def _order_of(self, num_heads: int, num_kv_heads: int, sizes: HeadSizes) -> Sequence[range]:
        """Return the same in the checkpoint's order of outputs; empty: as they are projected."""
        return ()

    def for_kernels(self) -> PackedAttention:
        """See `TokenMixer`."""
        return PackedAttention(self.heads, self.scores, self.rotary, layers_back=self.layer_idx - self._kv_layer)

    def mix(self, qkv: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """Store K and V in the cache, unless they are another layer's, and attend.

        Shapes: qkv [T, (Q + 2 KV) * D], or [T, Q * D], from `qkv_proj`, of this rank's heads, used up -> [T, Q * D]
        of all heads, or of this rank's where the output projection takes these.
        """
        blocks, ranks = context.kv.layer(self._kv_layer), self._ranks
        if ranks is None:
            return self.attend_over(blocks, qkv, rotary, context.attention)
        if not self.is_normed_here and self.q_norm is not None and self.k_norm is not None:
            qkv = ranks.normalise(qkv, self.q_norm, self.k_norm, self.heads.eps)
        attended = self.attend_over(blocks, qkv, rotary, context.attention)
        return ranks.gather(attended) if self._gathers else attended

    def attend_over(
        self, blocks: KVBlocks, qkv: Tensor, rotary: Sequence[RotaryTable], metadata: AttentionMetadata
    ) -> Tensor:
        """Do the same over any blocks; the metadata number these."""
        q = self.store(blocks, qkv, rotary, metadata)
        return attend(q, blocks, metadata, self.scores)

    def store(
        self, blocks: KVBlocks, qkv: Tensor, rotary: Sequence[RotaryTable], metadata: AttentionMetadata
    ) -> Tensor:
        """Store K and V in blocks, if there are some, and return the queries [T, Q, D]; qkv is used up."""
        return self.store_ordered(blocks, in_order(qkv, self.order), rotary, metadata)

    def store_ordered(
        self, blocks: KVBlocks, qkv: Tensor, rotary: Sequence[RotaryTable], metadata: AttentionMetadata
    ) -> Tensor:
        """Do the same with queries, keys and values in their order."""
        table = None if self.rotary is None else rotary[self.rotary]
        return attention_input(qkv, self.heads, table, blocks, metadata)

    def on_host(self) -> Attention:
        """Return this attention for `attend_over` and `store` in main memory and float32, its norms and sinks too."""
        norms = (self.heads.q_norm, self.heads.k_norm, self.heads.v_norm)
        q_norm, k_norm, v_norm, sinks = (
            None if weight is None else weight.to("cpu", torch.float32) for weight in (*norms, self.scores.sinks)
        )
        attention = copy.copy(self)
        attention.scores = dataclasses.replace(self.scores, sinks=sinks)
        attention.heads = dataclasses.replace(self.heads, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm)
        return attention

    def matrix_names(self, prefix: str) -> dict[str, list[str]]:
        """Return the checkpoint names of the matrices that each field of `LayerFormats` is about."""
        names = {field_of(part): [f"{prefix}.{part}.weight"] for part in (*self.qkv_proj.parts, *self.o_proj.parts)}
        # Where there is none, what makes keys makes values, too; queries stand for what a layer does not have.
        keys = names.get("k_proj", names["q_proj"])
        return {"k_proj": keys, "v_proj": keys} | names

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.qkv_proj.named_weights(prefix)
        yield from self.o_proj.named_weights(prefix)
        if self.q_norm is not None:
            yield f"{prefix}.{self._names.q_norm}.weight", self.q_norm
        if self.k_norm is not None:
            yield f"{prefix}.{self._names.k_norm}.weight", self.k_norm
        if self._sinks is not None:
            yield f"{prefix}.sinks", self._sinks


def _rank_heads(config: ModelConfig, allocator: WeightAllocator, sizes: HeadSizes) -> rank_heads.RankHeads | None:
    """Return which of a layer's heads this rank has; None: all."""
    group = allocator.tensor_group
    if group is None:
        return None
    blocks = head_blocks(config.attention.num_heads, sizes.num_kv_heads, group.size)
    return rank_heads.RankHeads(partial(allocator.columns_of, group), group.rank, blocks, sizes.head_dim)


def _own_rows(ranks: rank_heads.RankHeads, parts: Iterable[str], head_dim: int) -> dict[str, range]:
    """Return the rows of the projections that a rank's heads need."""
    return {part: scaled(ranks.queries if part == "q_proj" else ranks.keys, head_dim) for part in parts}
