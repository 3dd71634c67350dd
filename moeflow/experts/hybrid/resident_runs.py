"""Layers in a row whose experts on the CPU are all in main memory: they take no leases, which would take time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moeflow.experts.cache.expert_cache import ExpertCache


class ResidentRuns:
    """The current run of such layers. The cache evicts nothing until its end."""

    def __init__(self, cache: ExpertCache) -> None:
        self._reads, self._num_experts = cache.kernel_reads, cache.num_experts
        self._used: list[NDArray[np.int64]] = []  # by layer, numbers over all layers
        self._first: int | None = None  # layer; None: there is no run

    def slots(self, layer: int, experts: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """Return the slots of a layer's experts, [E], if all of these are there; else the run ends, and None."""
        if self._first is None:
            self._reads.begin()
            self._first = layer
        table: NDArray[np.int32] = self._reads.slot_table[layer]
        if (table[experts] < 0).any():
            self.end()
            return None
        self._used.append(experts + layer * self._num_experts)
        return table

    def end(self) -> None:
        """End the run, and count its experts."""
        first, self._first = self._first, None
        if first is not None:
            used, end_layer = self._used, first + len(self._used)
            numbers = np.unique(np.concatenate(used)) if used else np.empty(0, np.int64)
            self._used = []
            self._reads.end_of(first, end_layer, numbers)
