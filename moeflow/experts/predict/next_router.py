"""Asks routers of later layers about this layer's input: finds most of the experts without any training.

How well depends on how many layers ahead: what comes between changes the input. One layer ahead is FATE's way
(2502.12224); from further ahead, a read can hide behind more than one layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from moeflow.experts.predict.predictor import Predictor, RoutedModel


class NextRouter(Predictor):
    """Keeps the guesses of the pass under way; the past does not count."""

    def __init__(self, model: RoutedModel, layers_ahead: int = 1) -> None:
        """Ask the router that follows by so many layers; at the first layer, all up to there."""
        super().__init__(model)
        self.routers_ahead = layers_ahead
        self._routers = model.routers
        self._guesses: list[list[int]] = [[] for _ in range(model.num_layers)]

    def due(self, layer: int) -> Sequence[int]:
        """See `Predictor.due`: each layer once a pass."""
        end = min(layer + self.routers_ahead + 1, self.num_layers)
        return range(1 if layer == 0 else layer + self.routers_ahead, end)

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Forget what was guessed of a layer, which has come."""
        self._guesses[layer] = []

    def observe_input(self, layer: int, hidden: Any) -> None:
        """Guess experts of later layers from this layer's input [T, H]."""
        for later in self.due(layer):
            topk_ids, _ = self._routers[later].route(hidden)
            self._guesses[later] = [expert for expert, _ in Counter(topk_ids.flatten().tolist()).most_common()]

    def predict(self, layer: int) -> list[int]:
        """Return the experts guessed for a layer; none for the first."""
        return self._guesses[layer]
