"""The memory that resident experts live in: slots of one size, allocated once, each ready to be read into.

Who is in which slot is not known here.
"""

from __future__ import annotations

from torch import Tensor

from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes
from moeflow.kernels.lazy_memory import allocate_lazily
from moeflow.memory.file_io import PAGE_BYTES, whole_pages

_HUGE_PAGE_BYTES = 2 * 1024**2  # what the system may take at a time


def arena_bytes(num_slots: int, slab_bytes: int) -> int:
    """Return the memory that so many slots take at most."""
    return -(-num_slots * whole_pages(slab_bytes) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES


def slots_within(budget_bytes: int, slab_bytes: int, *, least: int) -> int:
    """Return how many slots fit into a budget.

    Raises: CapacityError if that is fewer than `least`.
    """
    num_slots = budget_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES // whole_pages(slab_bytes)
    if num_slots < least:
        need = format_bytes(arena_bytes(least, slab_bytes))
        raise CapacityError(
            f"{format_bytes(max(budget_bytes, 0))} are left for experts, which need at least {need}: {least} experts "
            f"of {format_bytes(whole_pages(slab_bytes))} at a time. Raise the memory limit (--memory), or take a "
            "smaller weight format or KV cache"
        )
    return num_slots


class SlotArena:
    """A fixed number of slots; until one is written, it takes no memory."""

    def __init__(self, num_slots: int, slab_bytes: int) -> None:
        """Allocate. Raises: CapacityError if the system refuses."""
        self.num_slots = num_slots
        self.slot_bytes = whole_pages(slab_bytes)
        self.num_bytes = arena_bytes(num_slots, slab_bytes)
        try:
            storage = allocate_lazily(num_slots * self.slot_bytes + PAGE_BYTES)
        except MemoryError as error:
            raise CapacityError(
                f"{num_slots} experts need {format_bytes(self.num_bytes)}, which cannot be allocated; "
                "lower the memory limit (--memory)"
            ) from error
        start = -storage.data_ptr() % PAGE_BYTES
        self.slots: Tensor = storage[start : start + num_slots * self.slot_bytes].view(num_slots, self.slot_bytes)
        self._views = self.slots.view(-1).numpy().data

    def tensor(self, slot: int) -> Tensor:
        """Return a slot's memory: [slot_bytes] uint8."""
        return self.slots[slot]

    def view(self, slot: int) -> memoryview:
        """Return a slot's memory to read into: whole pages, aligned to them."""
        return self._views[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]
