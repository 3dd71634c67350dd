"""Who leaves a slot: the worst by a policy that looks back, or in a pass over nearly all experts by what comes next.

Knows what experts are worth, not where they are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeflow.experts.cache.eviction import EvictionPolicy, choose_victim
from moeflow.experts.cache.occupancy import Occupancy
from moeflow.experts.cache.scan import Scan


class EvictionSelector:
    """The choice among the experts of all layers, over the passes."""

    def __init__(self, policy: EvictionPolicy, num_layers: int, num_experts: int) -> None:
        """`num_experts` are those of a layer."""
        self.scan: Scan | None = None  # where a pass is that needs nearly all experts
        self._policy = policy
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._now = 0

    def begin_pass(self) -> None:
        """Count a pass: the unit of age for policies."""
        self._now += 1
        self.scan = None

    def scan_at(self, layer: int, *, num_kept: int) -> None:
        """Look ahead from this layer until the next pass begins; `num_kept` experts of all layers are for that one."""
        if self.scan is None:
            self.scan = Scan(self._num_layers, self._num_experts, num_kept=num_kept)
        self.scan.layer = layer

    def on_use(self, numbers: NDArray[np.int64]) -> None:
        """Hear that the pass needs these experts."""
        self._policy.on_use(numbers, self._now)

    def on_load(self, number: int) -> None:
        """Hear that an expert got a slot."""
        self._policy.on_load(number)

    def best_first(self, layer: int) -> list[int]:
        """Return a layer's experts, the worthiest first, of equal ones as they lie on disk."""
        first, end = layer * self._num_experts, (layer + 1) * self._num_experts
        order: list[int] = np.argsort(-self._policy.scores(self._now)[first:end], kind="stable").tolist()
        return order

    def choose(self, occupancy: Occupancy, awaited: NDArray[np.bool_], *, for_demand: bool) -> int | None:
        """Return the expert to evict, None if nobody may go: what is `awaited` goes for demand only, and last."""
        candidates = occupancy.evictable & ~awaited
        if for_demand and not candidates.any():
            candidates = occupancy.evictable
        if not candidates.any():
            return None
        if self.scan is None:
            return choose_victim(self._policy, candidates, self._now)
        return self.scan.victim(candidates, occupancy.held, self._policy.scores(self._now), for_demand=for_demand)
