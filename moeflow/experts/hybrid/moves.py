"""Brings popular experts into slots on the GPU while passes are running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from moeflow.experts.hybrid.hybrid_experts import HybridLayers
from moeflow.experts.hybrid.lanes import Event, Lanes
from moeflow.experts.hybrid.popularity import Move
from moeflow.experts.hybrid.slab_copies import SlabBuffer

MOVES_AT_ONCE: Final = 2  # more would take the link from the exchange within layers


class _Coming(msgspec.Struct, frozen=True):
    """An expert on its way."""

    layer: int
    expert: int
    slot: int
    arrived: Event


class SlotMover:
    """Moves at most a few experts at once. The CPU computes both experts of a move until it is finished."""

    def __init__(self, layers: HybridLayers, lanes: Lanes) -> None:
        """Allocate memory for an expert. Raises: RuntimeError from torch."""
        self._layers, self._tables, self._lanes = layers.experts, layers.tables, lanes
        self._buffer = SlabBuffer(1, layers, lanes)
        self._coming: list[_Coming] = []
        self.num_moves = 0

    def fill(self, layer: int, experts: Sequence[int]) -> None:
        """Put experts into the free slots of a layer."""
        self._lanes.copies_wait_for(self._lanes.computed())
        for slot, expert in enumerate(experts):
            self._load(layer, expert, slot)
            self._tables.put(layer, expert, slot)

    def settle(self) -> int:
        """Use the experts that have arrived, and return how many more moves may begin. No pass is running."""
        while self._coming and self._coming[0].arrived.query():
            arrived = self._coming.pop(0)
            self._tables.put(arrived.layer, arrived.expert, arrived.slot)
            self.num_moves += 1
        return MOVES_AT_ONCE - len(self._coming)

    def begin(self, moves: Sequence[Move]) -> None:
        """Begin moves. No pass is running on the host; the GPU may still read the slots."""
        for move in moves:
            slot = self._tables.take(move.layer, move.leaving)
            self._lanes.copies_wait_for(self._lanes.computed())
            self._load(move.layer, move.coming, slot)
            self._coming.append(_Coming(move.layer, move.coming, slot, self._lanes.copied()))

    def _load(self, layer: int, expert: int, slot: int) -> None:
        experts = self._layers[layer]
        self._buffer.copy(experts, [expert])
        with self._lanes.copying():
            self._buffer.store(1, experts.layout, experts.matrices, slot)
