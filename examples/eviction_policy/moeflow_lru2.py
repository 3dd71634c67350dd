"""LRU-2: evicts the expert whose second last use is longest ago, so that one chance use keeps no expert (O'Neil
1993)."""

import numpy as np

from moeflow.experts.cache.eviction import EvictionPolicy, Experts, Scores


class LRU2(EvictionPolicy):
    """Of experts whose second last uses are equally old, the last one counts."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._last = np.zeros(num_layers * num_experts)
        self._before = np.zeros(num_layers * num_experts)

    def on_use(self, experts: Experts, now: int) -> None:
        """Receive what a pass needs."""
        self._before[experts] = self._last[experts]
        self._last[experts] = now + 1

    def scores(self, now: int) -> Scores:
        """Return what each is worth; the lowest is evicted."""
        return self._before + self._last / (now + 2)
