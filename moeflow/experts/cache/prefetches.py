"""Experts that were read before a pass asked for them: which may still prove right, and which did or did not.

Whoever writes here holds the cache's lock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeflow.experts.cache.cache_stats import CacheStats


class Prefetches:
    """What was read ahead, by experts' numbers over all layers; counts its bytes in `stats`."""

    def __init__(self, num_experts: int, slab_bytes: int, stats: CacheStats) -> None:
        """Begin with none."""
        self.awaited = np.zeros(num_experts, bool)  # for a layer that no pass has reached since, arrived or not
        self._unused: set[int] = set()  # that arrived and no pass has needed so far
        self._slab_bytes = slab_bytes
        self._stats = stats

    def on_arrival(self, number: int) -> None:
        """Note that one is there."""
        self._stats.prefetched_bytes += self._slab_bytes
        self._unused.add(number)

    def on_use(self, number: int) -> None:
        """Note that a pass needs an expert: if it was read ahead, that was right."""
        if number in self._unused:
            self._unused.remove(number)
            self._stats.used_bytes += self._slab_bytes

    def on_uses(self, numbers: NDArray[np.int64]) -> None:
        """Note it of many."""
        if self._unused:
            for number in self._unused.intersection(numbers.tolist()):
                self.on_use(number)

    def on_eviction(self, number: int) -> None:
        """Note that an expert is evicted: if it was read ahead and not needed, that was in vain."""
        self.awaited[number] = False
        if number in self._unused:
            self._unused.remove(number)
            self._stats.wasted_bytes += self._slab_bytes
