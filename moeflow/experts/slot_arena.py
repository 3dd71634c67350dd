"""The memory of resident experts: aligned slots of one size, in a row.

The arena knows neither the experts in the slots nor the number of slots in use; unused slots give their memory back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.checkpoint.packed.file_io import PAGE_BYTES, whole_pages
from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes
from moeflow.kernels.lazy_memory import LazyMemory

if TYPE_CHECKING:
    from torch import Tensor

_HUGE_PAGE_BYTES = 2 * 1024**2  # the largest step of allocation


def arena_bytes(num_slots: int, slab_bytes: int) -> int:
    """Return the most memory that `num_slots` slots take."""
    return -(-num_slots * whole_pages(slab_bytes) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES


def num_slots_in(budget_bytes: int, slab_bytes: int) -> int:
    """Return how many slots fit into `budget_bytes`; 0 if these are negative."""
    return max(budget_bytes // _HUGE_PAGE_BYTES, 0) * _HUGE_PAGE_BYTES // whole_pages(slab_bytes)


def slots_within(budget_bytes: int, slab_bytes: int, *, least: int) -> int:
    """Return how many slots fit into a budget. Raises: CapacityError if fewer than `least` fit."""
    num_slots = num_slots_in(budget_bytes, slab_bytes)
    if num_slots < least:
        need = format_bytes(arena_bytes(least, slab_bytes))
        raise CapacityError(
            f"{format_bytes(max(budget_bytes, 0))} are left for experts, which need at least {need}: {least} experts "
            f"of {format_bytes(whole_pages(slab_bytes))} at a time. Raise the memory limit (--memory), or take a "
            "smaller weight format or KV cache"
        )
    return num_slots


class SlotArena:
    """Memory for slots, allocated when they are written."""

    def __init__(self, num_slots: int, slab_bytes: int) -> None:
        """Reserve addresses. Raises: CapacityError if the system refuses."""
        self.num_slots = num_slots
        self.slot_bytes = whole_pages(slab_bytes)
        self.num_bytes = arena_bytes(num_slots, slab_bytes)
        try:
            self._memory = LazyMemory(num_slots * self.slot_bytes + PAGE_BYTES)
        except MemoryError as error:
            raise CapacityError(
                f"{num_slots} experts need {format_bytes(self.num_bytes)}, which cannot be allocated; "
                "lower the memory limit (--memory)"
            ) from error
        storage = self._memory.tensor
        self._start = -storage.data_ptr() % PAGE_BYTES
        end = self._start + num_slots * self.slot_bytes
        self.slots: Tensor = storage[self._start : end].view(num_slots, self.slot_bytes)
        self._views = self.slots.view(-1).numpy().data

    def tensor(self, slot: int) -> Tensor:
        """Return a slot's memory: [slot_bytes] uint8."""
        return self.slots[slot]

    def view(self, slot: int) -> memoryview:
        """Return a slot's memory to read into: whole pages, aligned to them."""
        return self._views[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def copy(self, source: int, target: int) -> None:
        """Copy the contents of a slot to another."""
        self.slots[target].copy_(self.slots[source])

    def give_back(self, first: int) -> None:
        """Give back the memory of this slot and all later ones. They are empty afterwards, and may be used again."""
        used = arena_bytes(first, self.slot_bytes)  # without the memory that the previous slot shares with them
        self._memory.give_back(self._start + used, self._start + self.num_slots * self.slot_bytes)
