"""The protocol of predictors of experts. A predictor only orders prefetches: the model's routers choose the experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

MAX_TOKENS: Final = 8  # of a pass with prediction; larger ones keep the disk busy with reads on demand
MAX_LOOK_AHEAD: Final = 4  # layers whose routers can run at once


class Routes(Protocol):
    """A layer's router, or its recorded choices."""

    def route(self, hidden: Any) -> tuple[Any, Any]:
        """Return topk_ids and topk_weights, arrays or tensors [T, K], of hidden [T, H]."""


class RoutedModel(msgspec.Struct, frozen=True):
    """The model that a predictor is for."""

    num_layers: int  # with experts
    num_experts: int  # of a layer
    routers: Sequence[Routes] = ()  # of these layers; none if they cannot run
    has_network: bool = False  # whether a network predicts all layers before each pass


class Predictor(ABC):
    """Predicts a layer's experts. A new predictor is a file in this folder and a row in `registry.py`."""

    # How many layers ahead it runs routers; 0: it uses other data. Kernels do the former by themselves.
    routers_ahead: int = 0

    def __init__(self, model: RoutedModel) -> None:
        """Start without a past."""
        self.num_layers = model.num_layers

    def due(self, layer: int) -> Sequence[int]:
        """Return the layers to predict after this one was observed."""
        return ((layer + 1) % self.num_layers,)

    def expect(self, named: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Receive a network's prediction for each layer of the pass that begins, likeliest first."""

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:  # noqa: B027
        """Receive the experts that a layer's router chose, each repeated if several tokens chose it."""

    def observe_input(self, layer: int, hidden: Any) -> None:  # noqa: B027
        """Receive a layer's input, [T, H] as routers take it, before the due layers are predicted."""

    @abstractmethod
    def predict(self, layer: int) -> list[int]:
        """Return the experts worth prefetching for a layer, likeliest first."""
