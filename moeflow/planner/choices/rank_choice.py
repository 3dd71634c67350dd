"""How ranks share a model, that they can, and what each of them then holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from moeflow.core.address import format_address
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import (
    ATTENTION_LAYOUTS,
    EXPERT_LAYOUTS,
    EXPERT_PLACEMENTS,
    ParallelConfig,
)
from moeflow.core.units import format_bytes
from moeflow.parallel.blocks import band_blocks, even_blocks, head_blocks, num_kv_heads
from moeflow.parallel.placement.placement import slots_per_rank
from moeflow.planner.choices.join_choice import choose_join
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.costs.model_costs import ModelCosts, bits_per_value
from moeflow.planner.settings import Settings

Layout = TypeVar("Layout", bound=str)


def choose_ranks(settings: Settings, shape: ModelConfig) -> ParallelConfig | None:
    """Return how ranks share a model; None: there is one. Raises: ConfigError if they cannot."""
    parallel = ParallelConfig(
        num_ranks=settings.num_ranks or 1,
        expert_layout=_known("expert_layout", settings.expert_layout, EXPERT_LAYOUTS),
        attention_layout=_known("attention_layout", settings.attention_layout, ATTENTION_LAYOUTS),
        moves_experts=_known("expert_placement", settings.expert_placement, EXPERT_PLACEMENTS) == "load",
        num_redundant_experts=settings.num_redundant_experts or 0,
        join=choose_join(settings),
    )
    number = parallel.num_ranks
    if number == 1:
        _refuse_layouts(settings)
        return None
    if parallel.attention_layout == "tensor" and number > shape.num_heads:
        raise ConfigError(
            f"{number} ranks (--ranks) cannot share {shape.num_heads} attention heads (--attention-layout tensor): "
            "use fewer"
        )
    if not shape.num_experts and parallel.attention_layout == "replicated":
        raise ConfigError(
            f"{number} ranks (--ranks) cannot share the layers of a model with no experts: use one, or have them "
            "share attention and dense layers (--attention-layout tensor)"
        )
    if shape.num_experts and parallel.expert_layout == "expert" and number > shape.num_experts:
        raise ConfigError(
            f"{number} ranks (--ranks) cannot share the layers of a model with only {shape.num_experts} experts: use "
            "fewer, or slices of experts (--expert-layout sliced)"
        )
    _check_replicas(parallel, shape)
    return parallel


def _check_replicas(parallel: ParallelConfig, shape: ModelConfig) -> None:
    """Raises: ConfigError if replicas of experts are asked for that cannot be placed."""
    redundant, number = parallel.num_redundant_experts, parallel.num_ranks
    can_move = parallel.moves_experts and parallel.expert_layout == "expert"
    most = (number - 1) * shape.num_experts
    if redundant > most or (redundant and not can_move):
        raise ConfigError(
            f"{redundant} replicas of experts (--redundant-experts) cannot be placed: give at most {most}, which is "
            f"each expert on each of {number} ranks, with --expert-placement load and --expert-layout expert"
        )


def explain_ranks(parallel: ParallelConfig, shape: ModelConfig, reasons: Reasons) -> None:
    """Add what each rank has."""
    parts = []
    number = parallel.num_ranks
    if shape.num_experts and parallel.expert_layout == "expert":
        experts = _sizes(even_blocks(shape.num_experts, number))
        text = f"{experts} of the {shape.num_experts} experts of a layer"
        if parallel.num_redundant_experts:
            text += f", {parallel.num_redundant_experts} of them with a replica"
        parts.append(text + (", moved as loads call for it" if parallel.moves_experts else ""))
    elif shape.num_experts:
        units = _sizes(band_blocks(shape.intermediate_size, number))
        parts.append(f"a slice of every expert, {units} of {shape.intermediate_size} units")
    if parallel.attention_layout == "tensor":
        heads = _sizes(head_blocks(shape.num_heads, shape.num_kv_heads, number).queries)
        parts.append(f"{heads} of the {shape.num_heads} attention heads, and as much of dense layers and the head")
    reasons.append(("ranks", f"{number}: each has {'; '.join(parts)}"))
    if parallel.join is not None:
        at = format_address(parallel.join.host, parallel.join.port)
        reasons.append(("other ranks", f"join at {at}, with the token in {parallel.join.token_file}"))


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What ranks hold of a model."""

    weight_bytes: tuple[int, ...]  # by rank
    is_spread: bool  # over machines: all but the first rank join
    num_kv_heads: int  # of the rank with the most

    @classmethod
    def of(cls, costs: ModelCosts, parallel: ParallelConfig | None) -> RankMemory:
        """Return what the weights of each rank take; None: there is one, with all of them."""
        if parallel is None:
            return cls((int(costs.model_bytes),), False, costs.shape.num_kv_heads)
        ranks = range(parallel.num_ranks)
        return cls(
            tuple(int(_weight_bytes(costs, parallel, rank)) for rank in ranks),
            parallel.join is not None,
            max(num_kv_heads(costs.shape, parallel, rank) for rank in ranks),
        )

    @property
    def here(self) -> Sequence[int]:
        """The weights of each rank on this machine; where others join, as many as any of them has."""
        return [max(self.weight_bytes)] if self.is_spread else self.weight_bytes

    def shape(self, shape: ModelConfig) -> ModelConfig:
        """Return a model with as many KV heads as a rank has of it: what keys and values take is counted by these."""
        return dataclasses.replace(shape, num_kv_heads=self.num_kv_heads)

    def explain(self, shape: ModelConfig, kv_bytes: int, parallel: ParallelConfig, reasons: Reasons) -> None:
        """Add how many bytes of weights, keys and values each rank holds, where it has a KV cache of so many."""
        of_head = kv_bytes // self.num_kv_heads
        caches = [of_head * num_kv_heads(shape, parallel, rank) for rank in range(parallel.num_ranks)]
        each = [
            f"{format_bytes(weights)} and {format_bytes(cache)}"
            for weights, cache in zip(self.weight_bytes, caches, strict=True)
        ]
        reasons.append(("memory of ranks", ", ".join(each)))


def _weight_bytes(costs: ModelCosts, parallel: ParallelConfig, rank: int) -> float:
    """Return what the weights of a rank take."""
    shape, is_cut = costs.shape, parallel.attention_layout == "tensor"
    head, table = _head_and_table(costs)
    attention: float = costs.qkv_values + costs.output_values
    dense: float = costs.dense_values
    if is_cut:
        number, of_head = parallel.num_ranks, shape.hidden_size * shape.head_dim
        heads = head_blocks(shape.num_heads, shape.num_kv_heads, number)
        outputs = len(band_blocks(shape.hidden_size, number)[rank]) / shape.hidden_size
        attention = of_head * (len(heads.queries[rank]) + 2 * len(heads.keys[rank])) + costs.output_values * outputs
        dense *= _slice_share(shape.hidden_size, costs.dense_width, number, rank)
        head *= len(band_blocks(shape.vocab_size, number)[rank]) / shape.vocab_size
    routers = costs.num_moe_layers * costs.router_values * bits_per_value(costs.formats.of_routers) / 8
    layers = (shape.num_layers * attention + costs.num_dense_layers * dense) * costs.formats.weight_bytes
    return layers + routers + table + head + costs.experts_bytes * _expert_share(shape, parallel, rank)


def _expert_share(shape: ModelConfig, parallel: ParallelConfig, rank: int) -> float:
    """Return which share of all experts' bytes a rank has, or may come to have where experts move."""
    if not shape.num_experts:
        return 0.0
    if parallel.expert_layout == "sliced":
        return _slice_share(shape.hidden_size, shape.intermediate_size, parallel.num_ranks, rank)
    if parallel.moves_experts:
        num_held = slots_per_rank(shape.num_experts, parallel.num_ranks, parallel.num_redundant_experts)
    else:
        num_held = len(even_blocks(shape.num_experts, parallel.num_ranks)[rank])
    return num_held / shape.num_experts


def _slice_share(hidden_size: int, width: int, num_ranks: int, rank: int) -> float:
    """Return which share of a network's three matrices its slice is: of gate and up by units, of down by outputs."""
    if width == 0:  # there is no such network
        return 0.0
    units, outputs = (len(band_blocks(count, num_ranks)[rank]) / count for count in (width, hidden_size))
    return (2 * units + outputs) / 3


def _head_and_table(costs: ModelCosts) -> tuple[float, float]:
    """Return the bytes of the output projection, 0 if it is the token embeddings', and of these."""
    is_tied = costs.shape.tie_word_embeddings
    table = costs.embedding_bytes / (1 if is_tied else 2)
    return 0.0 if is_tied else table, table


def _known(name: str, value: str, layouts: Sequence[Layout]) -> Layout:
    """Return a layout by its name. Raises: ConfigError."""
    for layout in layouts:
        if layout == value:
            return layout
    raise ConfigError(f"{name} {value!r} is unknown; use one of {', '.join(layouts)}")


def _refuse_layouts(settings: Settings) -> None:
    """Raises: ConfigError if one rank is to share something."""
    if settings.expert_layout != "expert":
        raise ConfigError("slices of experts (--expert-layout sliced) are for several ranks: say how many (--ranks)")
    if settings.num_redundant_experts is not None:
        raise ConfigError("replicas of experts (--redundant-experts) are for several ranks: say how many (--ranks)")
    if settings.attention_layout != "replicated":
        raise ConfigError("blocks of heads (--attention-layout tensor) are for several ranks: say how many (--ranks)")


def _sizes(blocks: Sequence[range]) -> str:
    return " or ".join(map(str, sorted({len(block) for block in blocks})))
