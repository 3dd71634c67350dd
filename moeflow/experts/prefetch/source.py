"""The protocol of prefetch sources. A source ranks experts; the model's own routers decide which experts compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from moeflow.core.request import Request
from moeflow.core.trial import Trial
from moeflow.experts.predict.predictor import MAX_TOKENS
from moeflow.kernels.cpu.decoder import NOTHING, Expected


class Pass(Protocol):
    """A pass, live or recorded."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that it computes."""


PassT = TypeVar("PassT", bound=Pass)


class Source(Generic[PassT]):
    """Ranks experts before a pass begins, or layer by layer. `PrefetchDriver` prefetches them in this order."""

    def __init__(self, trial: Trial, num_experts: int, *, max_tokens: float = MAX_TOKENS) -> None:
        """`trial` decides from measured times of passes whether the driver follows this source.

        `num_experts` is the number in a layer; `max_tokens` limits the passes that the source ranks experts for.
        """
        self.trial, self._num_experts, self._max_tokens = trial, num_experts, max_tokens

    def expect(self, request: Request) -> None:
        """Receive a request of a later pass."""

    def begin_pass(self, batch: PassT) -> bool:
        """Begin a pass; return whether the source can rank experts for it. The trial judges only such passes."""
        return batch.num_tokens <= self._max_tokens

    def rank_pass(self, batch: PassT) -> Sequence[int]:
        """Return experts of the pass that begins, numbered over all layers, in the order of need."""
        return ()

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Receive the choice of a layer's router: the experts of each token, repeated if several tokens chose one."""

    def rank_layers(self, layer: int, num_tokens: int, hidden: Any) -> Iterable[tuple[int, Sequence[int]]]:
        """Return later layers and their experts, likeliest first, after a layer was observed.

        `num_tokens` were computed. Shapes: hidden [T, H], the layer's input; None if kernels ran the layer alone.
        """
        return ()

    def expected(self, num_tokens: int) -> Expected:
        """Return the experts that kernels should expect while they run layers alone."""
        return NOTHING

    def close(self) -> None:
        """End the source's threads. Blocks: until their current work is done."""


def numbered(experts_of_layers: Iterable[Sequence[int]], num_experts: int, first_layer: int = 0) -> list[int]:
    """Return the experts of successive layers, numbered over all layers."""
    layers = enumerate(experts_of_layers, first_layer)
    return [layer * num_experts + expert for layer, experts in layers for expert in experts]
