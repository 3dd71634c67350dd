"""The budget over any sequence of passes, growth, loads and leases: never above the limit, nothing leased is taken."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moeflow.core.errors import CapacityError
from moeflow.experts.budget import CALM_PASSES, MemoryLimit

SLOT_BYTES, CAPACITY, LEAST, LIMIT = 10, 40, 2, 300


class FakeSlots:
    """Slots that take memory when they are first filled; those of a lease stay."""

    def __init__(self, num_slots=LEAST):
        self.num_slots = num_slots
        self.num_filled = 0
        self.num_leased = 0

    @property
    def taken_bytes(self):
        return self.num_filled * SLOT_BYTES

    def within(self, num_bytes):
        return min(max(num_bytes, 0) // SLOT_BYTES, CAPACITY)

    def resize(self, num_slots):
        self.num_slots = max(num_slots, self.num_leased)
        self.num_filled = min(self.num_filled, self.num_slots)
        return self.num_slots


class BudgetMachine(RuleBasedStateMachine):
    """A process that takes its announced memory or less, and fills slots at any time."""

    @initialize(fixed=st.integers(0, 200))
    def start(self, fixed):
        self.slots = FakeSlots()
        self.other = fixed
        self.budget = MemoryLimit(LIMIT, self.slots, lambda: self.held, min_slots=LEAST)
        self.announced = 0

    @property
    def held(self):
        return self.other + self.slots.taken_bytes

    @rule(growth=st.integers(0, 120), is_pass=st.booleans())
    def announce(self, growth, is_pass):
        before = self.slots.num_slots
        try:
            (self.budget.make_room if is_pass else self.budget.make_room_between_passes)(growth)
        except CapacityError:
            self.announced = 0
            least = max(LEAST, self.slots.num_leased)
            assert self.slots.num_slots == least
            assert self.other + growth + least * SLOT_BYTES > LIMIT
        else:
            self.announced = growth
            assert self.slots.num_slots * SLOT_BYTES + self.other + growth <= LIMIT or self.slots.num_slots == before
            assert self.slots.num_slots >= LEAST
            assert is_pass or self.slots.num_slots <= before

    @rule(share=st.floats(0, 1))
    def grow(self, share):
        taken = int(self.announced * share)
        self.announced -= taken
        self.other += taken

    @rule(share=st.floats(0, 1))
    def free(self, share):
        self.other -= int(self.other * share)

    @precondition(lambda self: self.announced)  # in a pass that may run
    @rule(num_slots=st.integers(1, CAPACITY))
    def load(self, num_slots):
        self.slots.num_filled = min(self.slots.num_filled + num_slots, self.slots.num_slots)

    @precondition(lambda self: self.announced)
    @rule(num_slots=st.integers(0, CAPACITY))
    def lease(self, num_slots):
        self.slots.num_leased = min(num_slots, self.slots.num_filled)

    @invariant()
    def never_above_the_limit(self):
        if hasattr(self, "budget"):
            assert self.held + self.announced <= LIMIT or not self.announced
            assert self.held <= LIMIT
            assert self.slots.num_filled >= self.slots.num_leased


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=40, stateful_step_count=20)


def test_slots_take_what_is_left_and_come_back_when_it_stays_free():
    slots, other = FakeSlots(), [100]
    budget = MemoryLimit(LIMIT, slots, lambda: other[0] + slots.taken_bytes, min_slots=LEAST)
    budget.make_room(0)
    assert slots.num_slots == 20
    slots.num_filled = 20
    budget.make_room(55)
    assert slots.num_slots == 14
    other[0] += 55
    budget.make_room(5)
    assert slots.num_slots == 14
    other[0] -= 55
    for _ in range(CALM_PASSES):
        assert slots.num_slots == 14
        budget.make_room(0)
    assert slots.num_slots == 20
    assert budget.other_bytes == 100


def test_what_cannot_be_had_says_what_is_held():
    slots = FakeSlots()
    budget = MemoryLimit(LIMIT, slots, lambda: 250, min_slots=LEAST)
    with pytest.raises(
        CapacityError, match=r"limit of 300 B is reached: 250 B .* 31 B more .*, and 2 experts .*--memory"
    ):
        budget.make_room(31)
    assert slots.num_slots == LEAST


def test_what_is_touched_between_passes_is_no_calm_pass():
    slots, other = FakeSlots(), [100]
    budget = MemoryLimit(LIMIT, slots, lambda: other[0] + slots.taken_bytes, min_slots=LEAST)
    budget.make_room(50)
    assert slots.num_slots == 15
    for _ in range(2 * CALM_PASSES):
        budget.make_room_between_passes(0)
    assert slots.num_slots == 15
    budget.make_room_between_passes(90)
    assert slots.num_slots == 11
    for _ in range(CALM_PASSES):
        budget.make_room(50)
    assert slots.num_slots == 15
    with pytest.raises(CapacityError):
        budget.make_room_between_passes(190)
