"""Runs the routers of later layers on this layer's input: finds most of the experts without any training.

Accuracy falls with the number of layers ahead, since the layers between change the input. FATE looks one layer ahead
(2502.12224). From further ahead, a read can hide behind more than one layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from moeflow.experts.predict.predictor import Predictor, RoutedModel


class NextRouter(Predictor):
    """Keeps the predictions of the pass under way; the past does not count."""

    def __init__(self, model: RoutedModel, layers_ahead: int = 1) -> None:
        """Run the router `layers_ahead` layers later; at the first layer, all routers up to there."""
        super().__init__(model)
        self.routers_ahead = layers_ahead
        self._routers = model.routers
        self._predicted: list[list[int]] = [[] for _ in range(model.num_layers)]

    def due(self, layer: int) -> Sequence[int]:
        """See `Predictor.due`: each layer once a pass."""
        end = min(layer + self.routers_ahead + 1, self.num_layers)
        return range(1 if layer == 0 else layer + self.routers_ahead, end)

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Forget the prediction for a layer that has run."""
        self._predicted[layer] = []

    def observe_input(self, layer: int, hidden: Any) -> None:
        """Predict the experts of later layers from this layer's input [T, H]."""
        for later in self.due(layer):
            topk_ids, _ = self._routers[later].route(hidden)
            self._predicted[later] = [expert for expert, _ in Counter(topk_ids.flatten().tolist()).most_common()]

    def predict(self, layer: int) -> list[int]:
        """Return the predicted experts of a layer; none for the first."""
        return self._predicted[layer]
