"""Predictors in a replay: they are told, and asked, what they would be while a model serves.

Routers of later layers say what was recorded of them, and a network what it says of the recorded text. The time that
either takes is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.core.trial import Trial
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.predict.predictor import MAX_TOKENS, Predictor, RoutedModel
from moeflow.experts.predict.registry import BY_ROUTERS, COMBINED, NO_PREDICTOR, PREDICTORS, WHOLE_PASS
from moeflow.planner.simulator.replayed_passes import ReplayedPass
from moeflow.workload.routing_trace import ExpertIds, TraceHeader

PERFECT: Final = "perfect"
PREDICTOR_NAMES: Final = (NO_PREDICTOR, *PREDICTORS, WHOLE_PASS, PERFECT)


class ReplayedPrefetcher:
    """Calls predictor, governor and cache as the engine does."""

    def __init__(self, cache: ExpertCache, name: str, passes: Sequence[ReplayedPass], header: TraceHeader) -> None:
        """Raises: ConfigError if what the predictor goes by is not known of the passes."""
        self.num_passes_on = 0
        self._cache = cache
        self._hears_network = name in (WHOLE_PASS, COMBINED)
        self._predictor = _make_predictor(name, passes, header)
        self._is_active = name != NO_PREDICTOR
        self._trial = None if name == PERFECT else Trial(name)  # a bound is not doubted
        self._pass = passes[0]
        self._is_streamed_pass = False

    def begin_pass(self, one: ReplayedPass) -> None:
        """Begin a pass, and prefetch for all of it what a network names."""
        self._pass = one
        if one.named is None or not self._hears_network or not self._may_guess:
            return
        if self._predictor is not None:
            self._predictor.expect(one.named)
        names = one.named if self._predictor is None else list(map(self._predictor.predict, range(len(one.named))))
        first = range(0, len(names) * self._cache.num_experts, self._cache.num_experts)
        self._cache.prefetch_pass(
            [at + expert for at, of_layer in zip(first, names, strict=True) for expert in of_layer]
        )

    def see(self, layer: int) -> None:
        """Receive a layer's experts and prefetch for those to come."""
        if self._predictor is None:
            return
        self._predictor.observe(layer, self._pass.chosen[layer])
        if not self._may_guess:
            return
        if self._pass.ahead is not None:
            self._predictor.observe_input(layer, _RecordedInput(layer, self._pass.ahead[layer]))
        for later in self._predictor.due(layer):
            self._cache.prefetch(later, self._predictor.predict(later))

    def see_streamed(self, layer: int) -> None:
        """Receive the experts of a layer whose followers are read ahead anyway."""
        self._is_streamed_pass = True
        if self._predictor is not None:
            self._predictor.observe(layer, self._pass.chosen[layer])

    def end_pass(self, seconds: float) -> None:
        """Report to the trial how long a pass took."""
        if not self._is_active:
            return
        self.num_passes_on += self._may_guess
        is_streamed, self._is_streamed_pass = self._is_streamed_pass, False
        if self._trial is not None and not is_streamed and self._pass.num_tokens <= MAX_TOKENS:
            self._trial.end_pass(self._pass.num_tokens, seconds)

    @property
    def _may_guess(self) -> bool:
        """Whether guesses are followed in this pass; a bound's always are."""
        if self._trial is None:
            return True
        return self._is_active and self._trial.is_on and self._pass.num_tokens <= MAX_TOKENS


class PerfectPredictor(Predictor):
    """Knows the trace: what the best predictor could bring that looks one layer ahead."""

    def __init__(self, passes: Sequence[ReplayedPass]) -> None:
        super().__init__(RoutedModel(len(passes[0].needed), 0))
        self._needed = [needed for one in passes for needed in one.needed]
        self._position = 0

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Advance by a layer."""
        self._position += 1

    def predict(self, layer: int) -> list[int]:
        """Return what the next layer will need."""
        return self._needed[self._position] if self._position < len(self._needed) else []


@dataclass(frozen=True, slots=True)
class _RecordedInput:
    """Stands for what a layer's experts got: what the next routers would have chosen for it, [A, tokens, K]."""

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
    """Return what is asked layer by layer; None: nothing is."""
    if name == PERFECT:
        return PerfectPredictor(passes)
    has_network = any(one.named is not None for one in passes)
    if name == WHOLE_PASS and not has_network:
        raise ConfigError(f"{WHOLE_PASS} is a network that is asked about the text: name its model (--model)")
    if name in (NO_PREDICTOR, WHOLE_PASS):
        return None
    has_routers = any(one.ahead is not None for one in passes)
    if name in BY_ROUTERS and not has_routers:
        raise ConfigError(
            f"{name} asks routers, which are recorded in passes of {MAX_TOKENS} tokens or fewer, and the trace has none"
        )
    routers = [_RecordedRouter(layer) for layer in range(header.num_layers)] if has_routers else []
    model = RoutedModel(header.num_layers, header.num_experts, routers, has_network=has_network and name == COMBINED)
    return PREDICTORS[name](model)
