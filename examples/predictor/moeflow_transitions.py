"""Predicts a layer's experts by how often they followed those that the layer before has just chosen."""

from collections.abc import Sequence

import numpy as np

from moeflow.experts.predict.predictor import Predictor, RoutedModel


class Transitions(Predictor):
    """Counts pairs of experts of neighbouring layers, online; as many are predicted as were chosen."""

    def __init__(self, model: RoutedModel) -> None:
        super().__init__(model)
        self._counts = np.zeros((model.num_layers, model.num_experts, model.num_experts), np.int64)
        self._layer, self._chosen = -1, np.empty(0, np.int64)

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Receive what a layer's router chose."""
        chosen = np.unique(np.asarray(expert_ids, np.int64))
        if self._layer == (layer - 1) % self.num_layers:
            self._counts[layer][np.ix_(self._chosen, chosen)] += 1
        self._layer, self._chosen = layer, chosen

    def predict(self, layer: int) -> list[int]:
        """Return the experts that followed most often, likeliest first."""
        votes = self._counts[layer][self._chosen].sum(axis=0)
        best = np.argsort(-votes, kind="stable")[: len(self._chosen)]
        return [int(expert) for expert in best if votes[expert] > 0]
