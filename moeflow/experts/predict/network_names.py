"""Passes on what a trained network said of a pass before it began (SiDA's hash function): to be weighed with others."""

from __future__ import annotations

from collections.abc import Sequence

from moeflow.experts.predict.predictor import Predictor, RoutedModel


class NetworkNames(Predictor):
    """Keeps what was said of layers that are still to come."""

    def __init__(self, model: RoutedModel) -> None:
        super().__init__(model)
        self._named: list[Sequence[int]] = [()] * model.num_layers

    def expect(self, named: Sequence[Sequence[int]]) -> None:
        """See `Predictor.expect`."""
        self._named = list(named)

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Forget what was said of a layer, which has come."""
        self._named[layer] = ()

    def predict(self, layer: int) -> list[int]:
        """Return what the network named; nothing where it was not asked."""
        return list(self._named[layer])
