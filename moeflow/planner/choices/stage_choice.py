"""How a model's layers are cut into stages: as the user says, or so that stages have as much to hold and to compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import StageConfig
from moeflow.planner.costs.micro_batches import micro_batch_costs
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.settings.settings import Settings


def choose_stages(settings: Settings, costs: ModelCosts) -> StageConfig | None:
    """Return the layers of each stage; None: there is but one. Raises: ConfigError if they cannot be cut so."""
    wanted, num_layers = _wanted(settings), costs.shape.num_layers
    if len(wanted) > 1:
        if sum(wanted) != num_layers:
            raise ConfigError(
                f"stages of {', '.join(map(str, wanted))} layers (--stages) have {sum(wanted)} in total, but the model "
                f"has {num_layers}: name as many, or set only the number of stages"
            )
        _check_borders(wanted, costs.shape)
        return StageConfig(num_layers=wanted, costs=micro_batch_costs(costs))
    (number,) = wanted
    if number == 1:
        return None
    if number > num_layers:
        raise ConfigError(f"{number} stages (--stages) cannot share {num_layers} layers: use fewer")
    borders = costs.shape.stage_borders
    if number > len(borders) + 1:
        raise ConfigError(
            f"{number} stages (--stages) cannot share {num_layers} layers: the last layers attend to keys and values "
            f"of earlier ones. Use at most {len(borders) + 1}"
        )
    num_of_each = balanced(_layer_loads(costs), _ends_load(costs), number, borders)
    return StageConfig(num_layers=num_of_each, costs=micro_batch_costs(costs))


def _check_borders(num_of_each: Sequence[int], shape: ModelConfig) -> None:
    """Raise ConfigError if stages are cut where a layer attends to keys and values of one before."""
    *starts, _ = accumulate(num_of_each)
    borders = shape.stage_borders
    for start in starts:
        if start not in borders:
            raise ConfigError(
                f"layers cannot be cut before layer {start} (--stages): a later one attends to keys and values of "
                f"an earlier one. Cut before one of {', '.join(map(str, borders))}"
            )


def num_stages(settings: Settings) -> int:
    """Return into how many stages the user wants layers to be cut. Raises: ConfigError if the number is unclear."""
    wanted = _wanted(settings)
    return wanted[0] if len(wanted) == 1 else len(wanted)


def balanced(layers: Sequence[float], first: float, number: int, borders: Sequence[int]) -> tuple[int, ...]:
    """Return how many layers each of so many stages has, at least one, so that the greatest load is the least.

    `layers` are the loads of layers, `first` is the first stage's extra load. Stages begin at `borders`; there are
    enough of these.
    """
    before = list(accumulate(layers, initial=0.0))

    @cache
    def best(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Return the greatest load, and the layers of each stage, of the layers from this one on."""
        if stages == 1:
            return before[-1] - before[start], (len(layers) - start,)
        found: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())]
        for stop in borders:
            if stop <= start:
                continue
            rest, counts = best(stop, stages - 1)
            own = before[stop] - before[start] + (first if start == 0 else 0.0)
            found.append((max(own, rest), (stop - start, *counts)))
        return min(found)

    return best(0, number)[1]


def _layer_loads(costs: ModelCosts) -> list[float]:
    """Return the load of each layer: the mean of its shares of the model's bytes and of the operations of a token.

    Bytes are what a stage holds, and what bounds decodes; operations bound prompts.
    """
    shape = costs.shape
    attention = costs.qkv_values + costs.output_values
    all_tokens = costs.router_values + costs.shared_values
    experts = shape.routing.num_experts * costs.expert_values + all_tokens
    used = shape.routing.top_k * costs.expert_values + all_tokens
    moe = set(shape.moe_layers)
    held = [attention + (experts if layer in moe else costs.dense_values) for layer in range(shape.num_layers)]
    computed = [attention + (used if layer in moe else costs.dense_values) for layer in range(shape.num_layers)]
    scale = costs.formats.weight_bytes / costs.model_bytes
    return [(values * scale + computing / sum(computed)) / 2 for values, computing in zip(held, computed, strict=True)]


def _ends_load(costs: ModelCosts) -> float:
    """Return that of token embeddings and output projection, with which next to nothing of a prompt is computed."""
    return costs.embedding_bytes / costs.model_bytes / 2


def _wanted(settings: Settings) -> tuple[int, ...]:
    """Return the number of stages, or the layers of each. Raises: ConfigError if it is neither."""
    if settings.stages is None:
        return (1,)
    try:
        wanted = tuple(int(part) for part in settings.stages.split(","))
    except ValueError:
        wanted = (0,)
    if min(wanted) < 1:
        raise ConfigError(
            f"stages {settings.stages!r} (--stages) are neither a number, such as 2, nor the layers of each stage, "
            "such as 10,14"
        )
    return wanted
