"""How ranks share a model, that they can, and what each of them then holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Final, TypeVar

import msgspec

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import (
    ATTENTION_LAYOUTS,
    EXPERT_LAYOUTS,
    FORECAST_LAYOUTS,
    WHOLE,
    ParallelConfig,
)
from moeflow.core.units import format_bytes
from moeflow.kernels.on_demand import on_demand
from moeflow.parallel.blocks import band_blocks, even_blocks, head_blocks, with_kv_heads_of
from moeflow.parallel.placement.layouts import ADDED_LAYOUTS, LAYOUTS
from moeflow.parallel.stages import layers_of
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.choices.rank_limits import why_not_shared
from moeflow.planner.choices.stage_choice import choose_stages, num_stages
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.rank_shares import RankShares
from moeflow.settings.settings import Settings, given_options

with on_demand(__name__):
    from moeflow.parallel.placement import whole_experts
    from moeflow.planner.choices import device_ranks

_LAYOUTS_OF_EXPERTS: Final = ("expert_layout", "expert_placement", "num_redundant_experts")
_LAYOUTS: Final = (*_LAYOUTS_OF_EXPERTS, "attention_layout", "rank_schedule")
Layout = TypeVar("Layout", bound=str)


def count_ranks(settings: Settings) -> int:
    """Return how many ranks the user wants. Raises: ConfigError if stages cannot have as many each."""
    stages = num_stages(settings)
    number = settings.num_ranks or stages
    if number % stages:
        raise ConfigError(
            f"{number} ranks (--ranks) cannot be divided among {stages} stages (--stages): use a multiple of {stages}"
        )
    return number


def possible_ranks(settings: Settings, costs: ModelCosts) -> list[ParallelConfig]:
    """Return the ways ranks can share a model, the most usual first; none if there is one rank.

    Layouts that the user leaves open are tried, those of other packages only where they are named.
    Raises: ConfigError if the ranks cannot share it in any of these ways.
    """
    shape, number = costs.shape, count_ranks(settings)
    if number > 1 and settings.device not in ("cpu", "auto"):
        return device_ranks.possible_device_ranks(settings, costs)
    stages = choose_stages(settings, costs)
    LAYOUTS.get(settings.expert_layout)  # raises where packages have one name for several
    experts = _layouts("expert_layout", settings.expert_layout, EXPERT_LAYOUTS, ADDED_LAYOUTS)
    attention = _layouts("attention_layout", settings.attention_layout, FORECAST_LAYOUTS, ATTENTION_LAYOUTS[2:])
    placement, *_ = _layouts("expert_placement", settings.expert_placement, ("load", "index"))
    if number == (1 if stages is None else len(stages.num_layers)):
        _refuse_layouts(settings)
        return [] if stages is None else [ParallelConfig(num_ranks=number, stages=stages, is_spread=settings.is_spread)]
    if not shape.routing.num_experts:
        _refuse_layouts_of_experts(settings)
        experts = experts[:1]
    found, refused = [], []
    for attention_layout, expert_layout in product(attention, experts):
        parallel = ParallelConfig(
            num_ranks=number,
            stages=stages,
            expert_layout=expert_layout,
            attention_layout=attention_layout,
            moves_experts=placement == "load",
            num_redundant_experts=settings.num_redundant_experts or 0,
            is_spread=settings.is_spread,
        )
        why_not = _why_not(parallel, settings, shape)
        (refused.append(why_not) if why_not else found.append(parallel))
    if not found:
        raise ConfigError(refused[0])
    return found


def _why_not(parallel: ParallelConfig, settings: Settings, shape: ModelConfig) -> str:
    """Return why ranks cannot share a model with these settings; empty: they can."""
    if parallel.expert_layout != WHOLE and settings.expert_placement != "auto":
        return (
            f"--expert-placement {settings.expert_placement} is for whole experts in moeflow's own layout: remove the "
            "option, or use such a layout (--expert-layout expert)"
        )
    return why_not_shared(parallel, shape)


def explain_ranks(parallel: ParallelConfig, shape: ModelConfig, reasons: Reasons, *, on_devices: bool = False) -> None:
    """Add what each rank has; devices cut between any two units."""
    number = parallel.ranks_per_stage
    if parallel.stages is not None:
        layers = ", ".join(map(str, parallel.stages.num_layers))
        what = "token embeddings and output projection are in the first"
        reasons.append(("stages", f"{parallel.num_stages}: {layers} of the {shape.num_layers} layers; {what}"))
    if number > 1:
        text = "; ".join(_shared_parts(parallel, shape, even_blocks if on_devices else band_blocks))
        whose = "" if parallel.stages is None else f", {number} a stage"
        reasons.append(("ranks", f"{parallel.num_ranks}{whose}: each has {text}"))


def _shared_parts(
    parallel: ParallelConfig, shape: ModelConfig, cut: Callable[[int, int], Sequence[range]]
) -> list[str]:
    """Return what each rank has of the layers that it shares."""
    parts, number = [], parallel.ranks_per_stage
    if shape.routing.num_experts and parallel.expert_layout == WHOLE:
        experts = _sizes(even_blocks(shape.routing.num_experts, number))
        text = f"{experts} of the {shape.routing.num_experts} experts of a layer"
        if parallel.num_redundant_experts:
            text += f", {parallel.num_redundant_experts} of them with a replica"
        if parallel.expert_loads:
            text += ", placed by recorded loads"
        parts.append(text + (", moved as loads call for it" if parallel.moves_experts else ""))
    elif shape.routing.num_experts and not parallel.has_slices:
        held = whole_experts.WholeExperts.of(
            parallel, number, shape.num_moe_layers, shape.routing.num_experts
        ).most_held
        parts.append(
            f"{_one_of(held)} of the {shape.routing.num_experts} experts of a layer at most, as "
            f"{parallel.expert_layout} places them"
        )
    elif shape.routing.num_experts:
        units = _sizes(cut(shape.feed_forward.intermediate_size, number))
        parts.append(f"a slice of every expert, {units} of {shape.feed_forward.intermediate_size} units")
    if parallel.attention_layout == "tensor":
        heads = _sizes(head_blocks(shape.attention.num_heads, shape.attention.num_kv_heads, number).queries)
        parts.append(
            f"{heads} of the {shape.attention.num_heads} attention heads, and as much of dense layers and the head"
        )
    if parallel.has_own_sequences:
        parts.append("keys and values of its own sequences")
    return parts


class RankMemory(msgspec.Struct, frozen=True):
    """What ranks hold of a model."""

    weight_bytes: tuple[int, ...]  # by rank
    is_spread: bool  # over machines
    kv_shapes: tuple[ModelConfig, ...]  # by rank: models whose keys and values it has of the model

    @classmethod
    def of(cls, costs: ModelCosts, parallel: ParallelConfig | None) -> RankMemory:
        """Return what the weights of each rank take; None: there is one, with all of them."""
        shape = costs.shape
        if parallel is None:
            return cls((int(costs.model_bytes),), False, (shape,))
        ranks = range(parallel.num_ranks)
        return cls(
            tuple(round(costs.bytes_of(shares)) for shares in RankShares.of_all(shape, parallel)),
            parallel.is_spread,
            tuple(_kept_of(shape, parallel, rank) for rank in ranks),
        )

    @property
    def here(self) -> Sequence[int]:
        """The weights of each rank on this machine; if ranks are spread, as many as any of them has."""
        return [max(self.weight_bytes)] if self.is_spread else self.weight_bytes

    @property
    def kv_shape(self) -> ModelConfig:
        """That of the rank with the most keys and values."""
        return max(self.kv_shapes, key=_kv_values)

    def explain(self, kv_bytes: int, reasons: Reasons) -> None:
        """Add how many bytes of weights, keys and values each rank holds. No rank has more keys and values than
        `kv_bytes`."""
        most = max(_kv_values(self.kv_shape), 1)  # an encoder alone keeps none
        caches = [kv_bytes * _kv_values(shape) // most for shape in self.kv_shapes]
        each = [
            f"{format_bytes(weights)} and {format_bytes(cache)}"
            for weights, cache in zip(self.weight_bytes, caches, strict=True)
        ]
        reasons.append(("memory of ranks", ", ".join(each)))


def _kept_of(shape: ModelConfig, parallel: ParallelConfig, rank: int) -> ModelConfig:
    """Return a model with a rank's share of keys and values: its layers and its KV heads."""
    layers = layers_of(parallel, shape, rank)
    of_rank = with_kv_heads_of(shape, parallel, rank)
    kinds = of_rank.attention.layer_kinds[layers.start : layers.stop]
    return of_rank.with_fields(num_layers=len(layers), layer_kinds=kinds)


def _kv_values(shape: ModelConfig) -> int:
    """Return what a token's keys and values take, as numbers of one kind."""
    return shape.kv_bytes_per_token("float32")


def _layouts(name: str, value: str, known: Sequence[Layout], added: Sequence[Layout] = ()) -> Sequence[Layout]:
    """Return the layouts that a setting leaves open: all that are known, or the one of that name. Raises: ConfigError.

    The user has to name the `added` ones.
    """
    found = known if value == "auto" else [layout for layout in (*known, *added) if layout == value]
    if not found:
        raise ConfigError(f"{name} {value!r} is unknown; use one of auto, {', '.join((*known, *added))}")
    return found


def _refuse_layouts(settings: Settings) -> None:
    """Raises: ConfigError if one rank is to share something."""
    for flag, value in given_options(settings, _LAYOUTS).items():
        raise ConfigError(f"{flag} {value} is for several ranks: set their number (--ranks), or remove it")


def _refuse_layouts_of_experts(settings: Settings) -> None:
    """Raises: ConfigError if settings name experts of a model that has none."""
    for flag, value in given_options(settings, _LAYOUTS_OF_EXPERTS).items():
        if value != "expert":  # which is how plans of such models say it
            raise ConfigError(f"{flag} {value} is for models with experts, and this one is dense: remove it")


def _sizes(blocks: Sequence[range]) -> str:
    return _one_of(len(block) for block in blocks)


def _one_of(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(set(numbers))))
