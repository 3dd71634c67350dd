"""How often each expert was there when a pass needed it, counted while somebody wants to know."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray


class ExpertNeeds:
    """The counts of all experts, by their numbers over all layers."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.hits: NDArray[np.int64] = np.zeros(num_layers * num_experts, np.int64)
        self.misses: NDArray[np.int64] = np.zeros(num_layers * num_experts, np.int64)  # late ones included

    def add(self, needed: NDArray[np.int64], absent: Collection[int]) -> None:
        """Count distinct experts that a pass needed, and those of them that were absent or still loading."""
        self.hits[needed] += 1
        if absent:
            missed = np.array(list(absent), np.int64)
            self.hits[missed] -= 1
            self.misses[missed] += 1
