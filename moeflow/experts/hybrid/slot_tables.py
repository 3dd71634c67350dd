"""The experts that have slots on the GPU, as the GPU's kernels and the CPU's kernels read it.

Both tables change between passes only, so that each expert is computed exactly once in a pass.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeflow.kernels.device_arrays import pinned_bytes

NO_SLOT: Final = -1


class SlotTables:
    """The tables of all layers with experts."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device, always: range = range(0)) -> None:
        """Begin without an expert on the GPU, except for parts of the shared one, which have the slots `always`."""
        self.num_experts = num_experts  # of a layer
        parts = np.full((num_layers, len(always)), always, np.int32)
        # [layers, E + parts], the parts last
        self.slots: NDArray[np.int32] = np.hstack([np.full((num_layers, num_experts), NO_SLOT, np.int32), parts])
        # Where the CPU finds the experts that it computes; negative: the GPU computes it.
        numbers = np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))
        self.on_cpu: NDArray[np.int32] = np.hstack([numbers, np.full_like(parts, NO_SLOT)])
        self.on_gpu: Tensor = torch.full(self.slots.shape, NO_SLOT, dtype=torch.int32, device=device)
        self._has_changed = bool(always)

    def take(self, layer: int, expert: int) -> int:
        """Have the CPU compute an expert of the GPU, and return its slot."""
        slot = int(self.slots[layer, expert])
        assert slot != NO_SLOT, "the expert is on the CPU already"
        self.slots[layer, expert], self.on_cpu[layer, expert] = NO_SLOT, expert
        self._has_changed = True
        return slot

    def put(self, layer: int, expert: int, slot: int) -> None:
        """Have the GPU compute an expert whose weights are in a slot."""
        assert self.slots[layer, expert] == NO_SLOT, "the expert is on the GPU already"
        self.slots[layer, expert], self.on_cpu[layer, expert] = slot, NO_SLOT
        self._has_changed = True

    @property
    def is_on_gpu(self) -> NDArray[np.bool_]:
        """Whether each expert has a slot: [layers, E]."""
        found: NDArray[np.bool_] = self.slots[:, : self.num_experts] != NO_SLOT
        return found

    def publish(self) -> None:
        """Bring changes to the GPU, in the order of its stream. No pass is running on the host."""
        if self._has_changed:
            host = pinned_bytes([self.slots], self.on_gpu.device).view(torch.int32)[: self.slots.size]
            self.on_gpu.copy_(host.view(self.slots.shape), non_blocking=True)
            self._has_changed = False
