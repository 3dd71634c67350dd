"""Predicts the experts that a trained network named before the pass (SiDA's hash function), for use in combination."""

from __future__ import annotations

from collections.abc import Sequence

from moeflow.experts.predict.predictor import Predictor, RoutedModel


class NamedLayers(Predictor):
    """Keeps the network's prediction for layers to come."""

    def __init__(self, model: RoutedModel) -> None:
        super().__init__(model)
        self._named: list[Sequence[int]] = [()] * model.num_layers

    def expect(self, named: Sequence[Sequence[int]]) -> None:
        """See `Predictor.expect`."""
        self._named = list(named)

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Forget the prediction for a layer that has run."""
        self._named[layer] = ()

    def predict(self, layer: int) -> list[int]:
        """Return the network's experts for a layer; none without a prediction."""
        return list(self._named[layer])
