"""From how many tokens on the ranks of an engine compute a pass in two halves, one while the other waits.

Each half reads the weights, and waits for other ranks are shorter by the work of the other half. So it is for passes
whose computation takes longer than reading weights, and whose exchanges go over slow links.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import RANK_SCHEDULES, ParallelConfig
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.rank_costs import RankedLayers
from moeflow.settings.settings import Settings

LEAST_GAIN: Final = 1.05  # of the forecast, below which a pass stays whole
_FEWEST: Final = 2  # tokens that can be cut


def with_schedule(
    parallel: ParallelConfig, settings: Settings, shape: ModelConfig, model: CostModel | None, reasons: Reasons
) -> ParallelConfig:
    """Return ranks with the tokens from which they compute halves; `model` None: nothing is measured.

    Raises: ConfigError if they cannot.
    """
    schedule = settings.rank_schedule
    if schedule not in RANK_SCHEDULES:
        raise ConfigError(f"rank_schedule {schedule!r} is unknown; use one of {', '.join(RANK_SCHEDULES)}")
    if why_not := _why_not(parallel, settings, shape):
        if schedule == "asynchronous":
            raise ConfigError(f"--rank-schedule asynchronous does not go with {why_not}: remove one of them")
        return parallel
    if schedule == "asynchronous":
        return _from(parallel, _FEWEST, reasons)
    layers = None if model is None else model.ranked_layers
    if schedule == "synchronous" or layers is None or model is None or not parallel.is_spread:
        return parallel
    return _from(parallel, gaining_tokens(layers, model.chunk_tokens), reasons)


def gaining_tokens(layers: RankedLayers, most_tokens: int) -> int:
    """Return the fewest tokens of a prompt, a power of two, whose halves are faster by forecast; 0: none are."""
    sizes = (2**power for power in range(1, most_tokens.bit_length()))
    return next((size for size in sizes if layers.gain_of_halves(size) >= LEAST_GAIN), 0)


def _why_not(parallel: ParallelConfig, settings: Settings, shape: ModelConfig) -> str:
    if parallel.stages is not None:
        return "stages (--stages), which have micro-batches of their own"
    if parallel.has_own_sequences:
        return "ranks that attend to sequences of their own (--attention-layout data)"
    if settings.record_routing is not None:
        return "a record of routing (--record-routing)"
    if settings.capacity_factor is not None:
        return "a capacity of experts (--capacity-factor), which counts whole passes"
    if shape.encoder is not None:
        return "an encoder, whose inputs are computed whole"
    return ""


def _from(parallel: ParallelConfig, num_tokens: int, reasons: Reasons) -> ParallelConfig:
    if num_tokens:
        what = f"asynchronous: from {num_tokens} tokens on, half of a pass is computed while the other half waits"
        reasons.append(("schedule of ranks", what))
    return replace(parallel, alternating_tokens=num_tokens)
