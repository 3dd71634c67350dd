"""Predictors in a replay: they get the inputs and the calls of a serving model.

Recorded choices stand for routers of later layers, and a network's answers for the recorded text stand for the network.
The time of both is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.predict.governor import Governor
from moeflow.experts.predict.predictor import MAX_TOKENS, Predictor, RoutedModel
from moeflow.experts.predict.registry import BY_ROUTERS, COMBINED, NO_PREDICTOR, PREDICTORS, WHOLE_PASS
from moeflow.planner.simulator.replayed_passes import ReplayedPass
from moeflow.workload.routing_trace import ExpertIds, TraceHeader

PERFECT: Final = "perfect"
PREDICTOR_NAMES: Final = (NO_PREDICTOR, *PREDICTORS, WHOLE_PASS, PERFECT)


class ReplayedPrefetcher:
    """Calls predictor, governor and cache as the engine does."""

    def __init__(self, cache: ExpertCache, name: str, passes: Sequence[ReplayedPass], header: TraceHeader) -> None:
        """Raises: ConfigError if the passes lack the predictor's inputs."""
        self.num_passes_on = 0
        self._cache = cache
        self._hears_network = name in (WHOLE_PASS, COMBINED)
        self._predictor = _make_predictor(name, passes, header)
        self._is_active = name != NO_PREDICTOR
        self._governor = None if name == PERFECT else Governor(name)  # a bound has no governor
        self._pass = passes[0]
        self._is_streamed_pass = False

    def begin_pass(self, one: ReplayedPass) -> None:
        """Begin a pass, and prefetch the experts that a network names for all layers."""
        self._pass = one
        if one.named is None or not self._hears_network or not self._may_prefetch:
            return
        if self._predictor is not None:
            self._predictor.expect(one.named)
        names = one.named if self._predictor is None else list(map(self._predictor.predict, range(len(one.named))))
        first = range(0, len(names) * self._cache.num_experts, self._cache.num_experts)
        self._cache.prefetch_pass(
            [at + expert for at, of_layer in zip(first, names, strict=True) for expert in of_layer]
        )

    def see(self, layer: int) -> None:
        """Receive a layer's experts and prefetch for later layers."""
        if self._predictor is None:
            return
        self._predictor.observe(layer, self._pass.chosen[layer])
        if not self._may_prefetch:
            return
        if self._pass.ahead is not None:
            self._predictor.observe_input(layer, _RecordedInput(layer, self._pass.ahead[layer]))
        for later in self._predictor.due(layer):
            self._cache.prefetch(later, self._predictor.predict(later))

    def see_streamed(self, layer: int) -> None:
        """Receive the experts of a streamed layer, without prefetches."""
        self._is_streamed_pass = True
        if self._predictor is not None:
            self._predictor.observe(layer, self._pass.chosen[layer])

    def end_pass(self, seconds: float) -> None:
        """Report the seconds of a pass to the governor."""
        if not self._is_active:
            return
        self.num_passes_on += self._may_prefetch
        is_streamed, self._is_streamed_pass = self._is_streamed_pass, False
        if self._governor is not None and not is_streamed and self._pass.num_tokens <= MAX_TOKENS:
            self._governor.end_pass(self._pass.num_tokens, seconds)

    @property
    def _may_prefetch(self) -> bool:
        """Whether this pass prefetches by prediction; a bound always does."""
        if self._governor is None:
            return True
        return self._is_active and self._governor.is_on and self._pass.num_tokens <= MAX_TOKENS


class PerfectPredictor(Predictor):
    """Knows the trace: the upper bound for predictors that look one layer ahead."""

    def __init__(self, passes: Sequence[ReplayedPass]) -> None:
        super().__init__(RoutedModel(len(passes[0].needed), 0))
        self._needed = [needed for one in passes for needed in one.needed]
        self._position = 0

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Advance by a layer."""
        self._position += 1

    def predict(self, layer: int) -> list[int]:
        """Return the next layer's needed experts."""
        return self._needed[self._position] if self._position < len(self._needed) else []


@dataclass(frozen=True, slots=True)
class _RecordedInput:
    """Stands for the input of a layer's experts: the next routers' choices for it, [A, tokens, K]."""

    layer: int
    ahead: ExpertIds


@dataclass(frozen=True, slots=True)
class _RecordedRouter:
    """Stands for a layer's router."""

    layer: int

    def route(self, hidden: _RecordedInput) -> tuple[ExpertIds, None]:
        """Return topk_ids [tokens, K]."""
        return hidden.ahead[self.layer - hidden.layer - 1], None


def _make_predictor(name: str, passes: Sequence[ReplayedPass], header: TraceHeader) -> Predictor | None:
    """Return the predictor that is called layer by layer; None: no predictor."""
    if name == PERFECT:
        return PerfectPredictor(passes)
    has_network = any(one.named is not None for one in passes)
    if name == WHOLE_PASS and not has_network:
        raise ConfigError(f"{WHOLE_PASS} is a network that reads the text: name its model (--model)")
    if name in (NO_PREDICTOR, WHOLE_PASS):
        return None
    has_routers = any(one.ahead is not None for one in passes)
    if name in BY_ROUTERS and not has_routers:
        raise ConfigError(
            f"{name} needs routers, which are recorded in passes of at most {MAX_TOKENS} tokens, and the trace has none"
        )
    routers = [_RecordedRouter(layer) for layer in range(header.num_layers)] if has_routers else []
    model = RoutedModel(header.num_layers, header.num_experts, routers, has_network=has_network and name == COMBINED)
    return PREDICTORS[name](model)
