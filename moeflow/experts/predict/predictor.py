"""What every predictor of experts offers. It only orders prefetches: the true router decides what is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

MAX_TOKENS: Final = 8  # of a pass; more need so many experts that reads on demand keep the disk busy
MAX_LOOK_AHEAD: Final = 4  # layers of which routers can be asked at once


class Routes(Protocol):
    """A layer's router, or what was recorded of it."""

    def route(self, hidden: Any) -> tuple[Any, Any]:
        """Return topk_ids and topk_weights, arrays or tensors [T, K], of hidden [T, H]."""


class RoutedModel(msgspec.Struct, frozen=True):
    """What a predictor is made for."""

    num_layers: int  # with experts
    num_experts: int  # of a layer
    routers: Sequence[Routes] = ()  # of these layers; none where nobody can ask them
    has_network: bool = False  # one says before each pass what all layers will need


class Predictor(ABC):
    """Guesses a layer's experts. A new one is a file in this folder and a row in `registry.py`."""

    # How many layers ahead it asks routers, and nothing else; 0: it does not. Kernels do so by themselves.
    routers_ahead: int = 0

    def __init__(self, model: RoutedModel) -> None:
        """Start without a past."""
        self.num_layers = model.num_layers

    def due(self, layer: int) -> Sequence[int]:
        """Return the layers that are to be predicted once this one was observed."""
        return ((layer + 1) % self.num_layers,)

    def expect(self, named: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Receive what a network says that each layer will need in the pass that begins, likeliest first."""

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:  # noqa: B027
        """Receive what a layer's router chose in a pass: each token's experts, repeated if several tokens chose one."""

    def observe_input(self, layer: int, hidden: Any) -> None:  # noqa: B027
        """Receive a layer's input, [T, H] as routers take it, before those that are due are predicted."""

    @abstractmethod
    def predict(self, layer: int) -> list[int]:
        """Return the experts that a layer will need next, likeliest first; only those worth prefetching."""
