from __future__ import annotations

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.core.errors import CapacityError
from moeflow.core.units import MIB
from moeflow.experts.slot_arena import SlotArena, arena_bytes, num_slots_in


@pytest.mark.parametrize(("num_slots", "slab_bytes"), [(1, 1), (3, 5000), (2, 2 * MIB), (5, 3 * MIB + 1)])
def test_slots_are_pages_of_their_own(num_slots, slab_bytes):
    arena = SlotArena(num_slots, slab_bytes)
    for slot in range(num_slots):
        assert arena.tensor(slot).data_ptr() % PAGE_BYTES == 0
        assert len(arena.view(slot)) == arena.slot_bytes >= slab_bytes
        arena.view(slot)[:] = bytes([slot + 1]) * arena.slot_bytes
    for slot in range(num_slots):
        assert (arena.tensor(slot) == slot + 1).all()


@given(budget_bytes=st.integers(0, 10**12), slab_bytes=st.integers(1, 10**8))
def test_slots_stay_within_the_budget_and_waste_little_of_it(budget_bytes, slab_bytes):
    num_slots = num_slots_in(budget_bytes, slab_bytes)
    assert arena_bytes(num_slots, slab_bytes) <= budget_bytes
    assert arena_bytes(num_slots + 1, slab_bytes) > budget_bytes


def test_more_than_there_can_be_is_an_error():
    with pytest.raises(CapacityError, match="cannot be allocated"):
        SlotArena(2**40, 2**20)


def test_slots_that_are_given_back_are_free_and_the_others_stay():
    arena = SlotArena(30, 3 * MIB + 1)
    process = psutil.Process()
    before = process.memory_info().rss
    arena.slots.fill_(1)
    assert process.memory_info().rss - before > arena_bytes(29, 3 * MIB + 1)
    arena.give_back(7)
    assert process.memory_info().rss - before < arena_bytes(7, 3 * MIB + 1) + MIB
    assert (arena.slots[:7] == 1).all()
    arena.copy(6, 29)
    assert (arena.tensor(29) == 1).all()
    assert not arena.tensor(28).any()
