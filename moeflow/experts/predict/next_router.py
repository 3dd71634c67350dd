"""Asks the next layer's router about this layer's input: finds most of the experts without any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeflow.experts.predict.predictor import Predictor, RoutedModel

if TYPE_CHECKING:
    from torch import Tensor


class NextRouter(Predictor):
    """Keeps the guesses of the pass under way; the past does not count."""

    by_next_router = True

    def __init__(self, model: RoutedModel) -> None:
        self._routers = model.routers
        self._guesses: list[list[int]] = [[] for _ in model.routers]

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Forget what was guessed of a layer, which has come."""
        if self._guesses:
            self._guesses[layer] = []

    def observe_input(self, layer: int, hidden: Tensor) -> None:
        """Guess the following layer's experts from this layer's input [T, H]."""
        if layer + 1 < len(self._routers):
            topk_ids, _ = self._routers[layer + 1].route(hidden)
            self._guesses[layer + 1] = [expert for expert, _ in Counter(topk_ids.flatten().tolist()).most_common()]

    def predict(self, layer: int) -> list[int]:
        """Return the experts guessed for a layer; none for the first."""
        return self._guesses[layer]
