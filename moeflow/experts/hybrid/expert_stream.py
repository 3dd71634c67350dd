"""Long prompts: the CPU's experts of each layer stream through the GPU, a set at a time.

A set is copied while the GPU computes with the previous one, across the borders of layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from moeflow.core.hybrid_config import staged_experts
from moeflow.experts.hybrid.hybrid_experts import HybridExperts, HybridLayers
from moeflow.experts.hybrid.lanes import Event, Lanes
from moeflow.experts.hybrid.slab_copies import SlabBuffer
from moeflow.experts.hybrid.slot_tables import NO_SLOT
from moeflow.kernels.device_arrays import staged

if TYPE_CHECKING:
    from torch import Tensor

_NUM_BUFFERS: Final = 2


class _Set(msgspec.Struct, frozen=True):
    """Experts of a layer that are copied one after another."""

    layer: int
    experts: list[int]


class ExpertStream:
    """Computes the experts of passes that need nearly all of them."""

    def __init__(self, layers: HybridLayers, lanes: Lanes) -> None:
        """Allocate memory for the sets. Some experts have no slots. Raises: RuntimeError from torch."""
        self._layers, self._tables, self._lanes, self._device = layers.experts, layers.tables, lanes, layers.device
        num_cold = self._tables.num_experts - layers.config.num_gpu_experts
        self._set_size = staged_experts(num_cold, layers.largest_bytes)
        examples = {it.layout: it.matrices for it in layers.experts}
        self._staging = {layout: matrices.others(self._set_size) for layout, matrices in examples.items()}
        self._buffers = [SlabBuffer(self._set_size, layers, lanes) for _ in range(_NUM_BUFFERS)]
        self._sets: list[_Set] = []
        self._slots: Tensor | None = None  # [sets, E] int32
        self._arrived: dict[int, Event] = {}  # copies that have been started, by the number of the set
        self._next = 0  # set

    def begin_pass(self) -> None:
        """Plan the sets of a pass, and start the first copies."""
        self._sets = [found for layer in range(len(self._layers)) for found in self._sets_of(layer)]
        slots = np.full((len(self._sets), self._tables.slots.shape[1]), NO_SLOT, np.int32)
        for number, found in enumerate(self._sets):
            slots[number, found.experts] = np.arange(len(found.experts))
        (self._slots,) = staged([slots], self._device)
        self._next = 0
        self._arrived.clear()
        self._lanes.copies_wait_for(self._lanes.computed())  # an earlier pass that failed may still use the buffers
        for number in range(_NUM_BUFFERS):
            self._start(number)

    def sums(self, experts: HybridExperts, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `ExpertSums`: resident experts first, then sets in ascending order of expert."""
        assert self._slots is not None, "no pass has begun"
        staging = self._staging[experts.layout]
        total = experts.on_gpu.sums(hidden, topk_ids, topk_weights)
        while self._next < len(self._sets) and self._sets[self._next].layer == experts.layer:
            number, self._next = self._next, self._next + 1
            self._lanes.passes_wait_for(self._arrived.pop(number))
            self._buffers[number % _NUM_BUFFERS].store(len(self._sets[number].experts), experts.layout, staging, 0)
            self._lanes.copies_wait_for(self._lanes.computed())
            self._start(number + _NUM_BUFFERS)
            here = staging.holding(self._slots[number], experts.on_gpu.function, experts.on_gpu.biases)
            total = here.sums(hidden, topk_ids, topk_weights, total)
        return total

    def _sets_of(self, layer: int) -> list[_Set]:
        cold = np.flatnonzero(self._tables.slots[layer] == NO_SLOT).tolist()
        return [_Set(layer, cold[first : first + self._set_size]) for first in range(0, len(cold), self._set_size)]

    def _start(self, number: int) -> None:
        if number >= len(self._sets):
            return
        buffer, found = self._buffers[number % _NUM_BUFFERS], self._sets[number]
        self._arrived[number] = buffer.copy(self._layers[found.layer], found.experts, is_scan=True)
