"""Predicts the experts that a layer has used most, with decayed counts: popularity that changes slowly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from moeflow.experts.predict.predictor import Predictor, RoutedModel

HALF_LIFE_PASSES: Final = 256
MIN_RATE: Final = 0.2  # uses per pass; most prefetches of rarer experts would be useless


class FrequencyPredictor(Predictor):
    """Ranks experts by decayed count, down to a minimum rate."""

    def __init__(self, model: RoutedModel, half_life: float = HALF_LIFE_PASSES, min_rate: float = MIN_RATE) -> None:
        super().__init__(model)
        self._decay = 0.5 ** (1 / half_life)
        self._min_rate = min_rate
        self._counts = np.zeros((model.num_layers, model.num_experts))  # decayed number of passes that used it
        self._num_passes = np.zeros(model.num_layers)  # ... and of all passes

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Decay the layer's counts by a pass, then count."""
        self._counts[layer] *= self._decay
        self._num_passes[layer] = self._num_passes[layer] * self._decay + 1
        self._counts[layer, np.unique(np.asarray(expert_ids, dtype=np.int64))] += 1

    def predict(self, layer: int) -> list[int]:
        """Return the experts with at least `min_rate` uses per pass, the most used first."""
        counts = self._counts[layer]
        order = np.argsort(-counts, kind="stable")
        num_worthy = np.count_nonzero((counts > 0) & (counts >= self._min_rate * self._num_passes[layer]))
        ranked: list[int] = order[:num_worthy].tolist()
        return ranked
