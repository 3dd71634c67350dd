"""Where each expert is, as the kernels of a pass read it: they look without a lock whether a layer has what it needs.

So this table lags behind the cache, and only `publish` changes it, between two calls of kernels.
"""

from __future__ import annotations

from typing import Final

import numpy as np

ABSENT: Final = -1
LOADING: Final = -2  # on its way; both as csrc/ops.h has them


class SlotTable:
    """Slots by layer and expert."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """Begin with all absent."""
        self.slots = np.full((num_layers, num_experts), ABSENT, np.int32)  # always the same memory
        self.has_absent = True  # as of the last `publish`
        self._by_number = self.slots.reshape(-1)
        self._changes: dict[int, int] = {}

    def note(self, number: int, slot: int) -> None:
        """Note where an expert, by its number over all layers, is from the next `publish` on."""
        self._changes[number] = slot

    def noted(self, number: int) -> int:
        """Return where an expert is as far as it is noted."""
        return self._changes.get(number, int(self._by_number[number]))

    def publish(self) -> None:
        """Put down what was noted."""
        if self._changes:
            self._by_number[list(self._changes)] = list(self._changes.values())
            self._changes.clear()
            self.has_absent = bool((self._by_number == ABSENT).any())
