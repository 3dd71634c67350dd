"""Who is in which slot: the books of an expert cache. Knows no loads, policies or locks; whoever writes here holds one.

An expert has a slot from when its load begins. It can be evicted while it is resident and nobody has a lease on it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moeflow.experts.cache.slot_table import ABSENT, LOADING, SlotTable


class Occupancy:
    """Experts, by their numbers over all layers, and slots."""

    def __init__(self, num_layers: int, num_experts: int, num_slots: int) -> None:
        """Begin with empty slots; `num_experts` are those of a layer."""
        total = num_layers * num_experts
        self.num_slots = num_slots
        self.slots: list[int] = [-1] * total  # of those resident or loading
        self.is_resident: list[bool] = [False] * total
        self.num_leases: list[int] = [0] * total
        self.evictable = np.zeros(total, bool)
        self.held = np.zeros(num_layers, np.int64)  # slots of each layer
        self.table = SlotTable(num_layers, num_experts)  # for kernels
        self._num_experts = num_experts
        self._free = list(range(num_slots - 1, -1, -1))
        self._filled = bytearray(num_slots)  # 1 for slots that have held an expert

    @property
    def num_taken(self) -> int:
        """How many slots are not free."""
        return self.num_slots - len(self._free)

    @property
    def num_filled(self) -> int:
        """How many slots have held an expert since they came into use."""
        return self._filled.count(1)

    def take_free(self) -> int | None:
        """Take a free slot; None if there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Make a slot free that nobody is in."""
        self._free.append(slot)

    def place(self, number: int, slot: int) -> None:
        """Note that an expert is on its way into a slot that was taken for it."""
        self.slots[number] = slot
        self.table.note(number, LOADING)
        self.held[number // self._num_experts] += 1

    def arrive(self, number: int) -> None:
        """Note that an expert is there."""
        slot = self.slots[number]
        self.is_resident[number] = True
        self._filled[slot] = 1
        self.table.note(number, slot)
        self.evictable[number] = not self.num_leases[number]

    def vacate(self, number: int) -> int:
        """Take an expert out of its slot, or off its way there, and return the slot, which is not free yet."""
        slot, self.slots[number] = self.slots[number], -1
        self.is_resident[number] = False
        self.evictable[number] = False
        self.table.note(number, ABSENT)
        self.held[number // self._num_experts] -= 1
        return slot

    def lease(self, number: int) -> None:
        """Note one more lease."""
        self.num_leases[number] += 1
        self.evictable[number] = False

    def unlease(self, number: int) -> bool:
        """Note one less; return whether it was the last."""
        self.num_leases[number] -= 1
        if self.num_leases[number]:
            return False
        self.evictable[number] = self.is_resident[number]
        return True

    def min_size(self, num_slots: int) -> int:
        """Return how many slots there must be so that leased ones stay: at least `num_slots`."""
        leased = [slot for slot, leases in zip(self.slots, self.num_leases, strict=True) if slot >= 0 and leases]
        return max([num_slots, *(slot + 1 for slot in leased)])

    def grow(self, num_slots: int) -> None:
        """Have more slots, which are taken after those that there were."""
        self._free[:0] = range(num_slots - 1, self.num_slots - 1, -1)
        self._filled.extend(bytes(num_slots - self.num_slots))
        self.num_slots = num_slots

    def shrink(self, num_slots: int, move: Callable[[int, int], None]) -> None:
        """Have fewer, no more than so many taken: experts in the slots that go are moved, by `move(from, to)`."""
        self._free = [slot for slot in self._free if slot < num_slots]
        for number, slot in enumerate(self.slots):
            if slot >= num_slots:
                self.slots[number] = self._free.pop()
                self._filled[self.slots[number]] = 1
                self.table.note(number, self.slots[number])
                move(slot, self.slots[number])
        del self._filled[num_slots:]
        self.num_slots = num_slots

    def check_integrity(self) -> None:
        """Prove that all of this agrees; for tests."""
        taken = [slot for slot in self.slots if slot >= 0]
        assert sorted(taken + self._free) == list(range(self.num_slots))
        for number, slot in enumerate(self.slots):
            is_resident = self.is_resident[number]
            assert slot >= 0 or not is_resident
            assert self.num_leases[number] >= 0
            assert bool(self.evictable[number]) == (is_resident and not self.num_leases[number])
            assert self.table.noted(number) == (slot if is_resident else LOADING if slot >= 0 else ABSENT)
            assert self._filled[slot] or not is_resident
        held = [slot >= 0 for slot in self.slots]
        assert np.reshape(held, (len(self.held), -1)).sum(axis=1).tolist() == self.held.tolist()
