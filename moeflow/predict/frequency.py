"""Predicts the experts that a layer has used most, recent uses counting more: static popularity, slowly changing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

HALF_LIFE_PASSES: Final = 256


class FrequencyPredictor:
    """Ranks by decayed count; names each expert that was ever used, for who prefetches skips the resident."""

    def __init__(self, num_layers: int, num_experts: int, half_life: float = HALF_LIFE_PASSES) -> None:
        self._decay = 0.5 ** (1 / half_life)
        self._counts = np.zeros((num_layers, num_experts))

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Age the layer's counts by a pass, then count."""
        counts = self._counts[layer]
        counts *= self._decay
        np.add.at(counts, np.asarray(expert_ids, dtype=np.int64), 1.0)

    def predict(self, layer: int) -> list[int]:
        """Return the experts with a count, the highest first."""
        counts = self._counts[layer]
        order = np.argsort(-counts, kind="stable")
        ranked: list[int] = order[: np.count_nonzero(counts)].tolist()
        return ranked
