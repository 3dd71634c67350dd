"""The layers of a rank, and its shares of their parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.kernels.on_demand import on_demand
from moeflow.parallel.blocks import band_blocks, head_blocks
from moeflow.parallel.stages import layers_of, place_in_stage

with on_demand(__name__):
    from moeflow.parallel.placement import whole_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShares:
    """A rank's shares of each of its layers and of the output projection.

    Norms, routers and token embeddings are never divided.
    """

    layers: range | None = None  # None: all
    has_ends: bool = True  # token embeddings and output projection

    queries: float = 1.0  # of the heads, on the average of layers by their width
    keys: float = 1.0  # and values: of the KV heads, likewise
    outputs: float = 1.0  # of attention's output projection
    dense: float = 1.0  # of dense networks
    shared: float = 1.0  # of shared experts
    head: float = 1.0
    experts: float = 1.0  # of the bytes of all; of moving experts, the most that the rank can have

    @classmethod
    def of(cls, shape: ModelConfig, parallel: ParallelConfig, rank: int) -> RankShares:
        """Return the shares of a rank."""
        layers = layers_of(parallel, shape, rank)
        rank, number = place_in_stage(parallel, rank), parallel.ranks_per_stage
        own = cls(layers=layers, has_ends=layers.start == 0, experts=_expert_share(shape, parallel, rank, layers))
        if parallel.attention_layout != "tensor":
            return own
        queries, keys = _head_shares(shape, layers, number, rank)
        dense_width = (
            shape.feed_forward.dense_intermediate_size
            if shape.routing.num_experts
            else shape.feed_forward.intermediate_size
        )
        return replace(
            own,
            queries=queries,
            keys=keys,
            outputs=_band_share(shape.hidden_size, number, rank),
            dense=_slice_share(shape.hidden_size, dense_width, number, rank),
            shared=_slice_share(shape.hidden_size, shape.feed_forward.shared_intermediate_size, number, rank),
            head=_band_share(shape.vocab_size, number, rank),
        )

    @classmethod
    def of_all(cls, shape: ModelConfig, parallel: ParallelConfig) -> list[RankShares]:
        """Return the shares of each rank."""
        return [cls.of(shape, parallel, rank) for rank in range(parallel.num_ranks)]


WHOLE = RankShares()


def _head_shares(shape: ModelConfig, layers: range, num_ranks: int, rank: int) -> tuple[float, float]:
    """Return a rank's shares of its layers' queries, and of their keys and values."""
    sizes = [shape.attention.heads_of(layer) for layer in layers]
    cut = [(it, head_blocks(shape.attention.num_heads, it.num_kv_heads, num_ranks)) for it in sizes]
    queries = sum(it.head_dim * len(blocks.queries[rank]) for it, blocks in cut)
    keys = sum(it.head_dim * it.num_key_projections * len(blocks.keys[rank]) for it, blocks in cut)
    all_queries = sum(it.head_dim * shape.attention.num_heads for it in sizes)
    all_keys = sum(it.head_dim * it.num_key_projections * it.num_kv_heads for it in sizes)
    return queries / all_queries, keys / max(all_keys, 1)


def _expert_share(shape: ModelConfig, parallel: ParallelConfig, rank: int, layers: range) -> float:
    """Return the largest possible share of its layers' experts, for a rank at this place in its stage."""
    number = parallel.ranks_per_stage
    if not shape.routing.num_experts:
        return 0.0
    if parallel.has_slices:
        return _slice_share(shape.hidden_size, shape.feed_forward.intermediate_size, number, rank)
    if number == 1:
        return 1.0
    num_layers = len(shape.moe_numbers_in(layers))
    return (
        whole_experts.WholeExperts.of(parallel, number, num_layers, shape.routing.num_experts).most_held[rank]
        / shape.routing.num_experts
    )


def _slice_share(hidden_size: int, width: int, num_ranks: int, rank: int) -> float:
    """Return a slice's share of a network's three matrices: of gate and up by units, of down by outputs."""
    if width == 0:  # no such network
        return 0.0
    return (2 * _band_share(width, num_ranks, rank) + _band_share(hidden_size, num_ranks, rank)) / 3


def _band_share(num_outputs: int, num_ranks: int, rank: int) -> float:
    return len(band_blocks(num_outputs, num_ranks)[rank]) / num_outputs
