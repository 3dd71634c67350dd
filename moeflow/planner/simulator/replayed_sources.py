"""Prefetch sources in a replay: they receive the recorded choices, and rank experts as while the model serves.

Recorded routers and networks take no time in the replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.core.trial import Trial
from moeflow.experts.predict.predictor import MAX_TOKENS, Predictor, RoutedModel
from moeflow.experts.predict.registry import BY_ROUTERS, COMBINED, NO_PREDICTOR, PREDICTORS, WHOLE_PASS
from moeflow.experts.prefetch.layer_source import LayerSource
from moeflow.experts.prefetch.network_source import NetworkSource
from moeflow.experts.prefetch.source import Source
from moeflow.planner.simulator.replayed_passes import Named, ReplayedPass
from moeflow.workload.routing_trace import ExpertIds, TraceHeader

PERFECT: Final = "perfect"
PREDICTOR_NAMES: Final = (NO_PREDICTOR, *PREDICTORS, WHOLE_PASS, PERFECT)


def replayed_sources(name: str, passes: Sequence[ReplayedPass], header: TraceHeader) -> list[Source[ReplayedPass]]:
    """Return the source of a predictor, if there is one.

    Raises: ConfigError if the trace lacks what the predictor needs.
    """
    if name == NO_PREDICTOR:
        return []
    if name == PERFECT:
        return [LayerSource(_AlwaysOn(name), header.num_experts, _PerfectPredictor(passes), max_tokens=math.inf)]
    has_network = any(one.named is not None for one in passes)
    if name == WHOLE_PASS:
        if not has_network:
            raise ConfigError(f"{WHOLE_PASS} is a network that predicts from the text: name its model (--model)")
        return [NetworkSource(Trial(name), header.num_experts, _named)]
    has_routers = any(one.ahead is not None for one in passes)
    if name in BY_ROUTERS and not has_routers:
        raise ConfigError(
            f"{name} needs routers, recorded in passes of {MAX_TOKENS} tokens or fewer, but the trace has none"
        )
    has_network &= name == COMBINED
    routers = [_RecordedRouter(layer) for layer in range(header.num_layers)] if has_routers else []
    predictor = PREDICTORS[name](RoutedModel(header.num_layers, header.num_experts, routers, has_network=has_network))
    return [LayerSource(Trial(name), header.num_experts, predictor, _named if has_network else None)]


@dataclass(frozen=True, slots=True)
class RecordedInput:
    """Stands for a layer's input: the trace has the choices of the next routers for it."""

    one: ReplayedPass
    layer: int


@dataclass(frozen=True, slots=True)
class _RecordedRouter:
    """Stands for a layer's router."""

    layer: int

    def route(self, hidden: RecordedInput) -> tuple[ExpertIds, None]:
        """Return topk_ids [tokens, K]."""
        ahead = hidden.one.ahead
        assert ahead is not None, "small passes of a trace with routers have their choices"
        return ahead[hidden.layer, self.layer - hidden.layer - 1], None


class _PerfectPredictor(Predictor):
    """Reads the next layer's experts in the trace: the bound of predictors that look one layer ahead."""

    def __init__(self, passes: Sequence[ReplayedPass]) -> None:
        super().__init__(RoutedModel(len(passes[0].needed), 0))
        self._needed = [needed for one in passes for needed in one.needed]
        self._position = 0

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Advance by a layer."""
        self._position += 1

    def predict(self, layer: int) -> list[int]:
        """Return the experts of the next layer."""
        return self._needed[self._position] if self._position < len(self._needed) else []


class _AlwaysOn(Trial):
    """A trial that a bound always passes."""

    def __init__(self, name: str) -> None:
        super().__init__(name, starts_on=True)

    def end_pass(self, size: int, seconds: float, waited_s: float = 0.0) -> None:
        """Ignore the time."""


def _named(one: ReplayedPass) -> Named | None:
    return one.named
