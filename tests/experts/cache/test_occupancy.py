"""The books of slots against a plain dictionary, under every order of events."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moeflow.experts.cache.occupancy import Occupancy
from moeflow.experts.cache.slot_table import ABSENT, LOADING

NUM_LAYERS, NUM_EXPERTS = 2, 3
numbers = st.integers(0, NUM_LAYERS * NUM_EXPERTS - 1)


class BooksMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 6))
    def build(self, num_slots):
        self.books = Occupancy(NUM_LAYERS, NUM_EXPERTS, num_slots)
        self.contents = {}  # of slots: experts that are there
        self.loading = {}  # expert: slot
        self.leases = [0] * NUM_LAYERS * NUM_EXPERTS

    @rule(number=numbers)
    def place(self, number):
        if self.books.slots[number] >= 0:
            return
        slot = self.books.take_free()
        if slot is None:
            assert len(self.contents) + len(self.loading) == self.books.num_slots
            return
        assert slot not in self.contents
        self.books.place(number, slot)
        self.loading[number] = slot

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def arrive(self, data):
        number = data.draw(st.sampled_from(sorted(self.loading)))
        self.books.arrive(number)
        self.contents[self.loading.pop(number)] = number

    @rule(number=numbers)
    def vacate(self, number):
        if self.books.slots[number] < 0 or self.leases[number]:
            return
        slot = self.books.vacate(number)
        assert self.contents.pop(slot, None) == number or self.loading.pop(number) == slot
        self.books.give_back(slot)

    @rule(number=numbers)
    def lease(self, number):
        self.books.lease(number)
        self.leases[number] += 1

    @rule(number=numbers)
    def unlease(self, number):
        if self.leases[number]:
            self.leases[number] -= 1
            assert self.books.unlease(number) == (self.leases[number] == 0)

    @rule(num_slots=st.integers(1, 8))
    def resize(self, num_slots):
        if num_slots >= self.books.num_slots:
            self.books.grow(num_slots)
            return
        num_slots = self.books.min_size(max(num_slots, self.books.num_taken))
        if any(slot >= num_slots for slot in self.loading.values()):
            return  # the cache waits for them
        leased = {slot: number for slot, number in self.contents.items() if self.leases[number]}
        self.books.shrink(num_slots, self.move)
        assert leased.items() <= self.contents.items()

    def move(self, source, target):
        assert target not in self.contents
        self.contents[target] = self.contents.pop(source)

    @invariant()
    def everybody_is_where_the_books_say(self):
        self.books.check_integrity()
        assert self.books.num_taken == len(self.contents) + len(self.loading)
        assert self.books.num_filled >= len(self.contents)
        self.books.table.publish()
        where = {number: slot for slot, number in self.contents.items()}
        for number, slot in enumerate(self.books.table.slots.ravel().tolist()):
            assert slot == where.get(number, LOADING if number in self.loading else ABSENT)
            assert self.books.is_resident[number] == (number in where)
            assert bool(self.books.evictable[number]) == (number in where and not self.leases[number])


TestBooks = pytest.mark.slow(BooksMachine.TestCase)


def test_a_leased_slot_says_how_few_there_may_be():
    books = Occupancy(1, 4, 4)
    for number in range(3):
        books.place(number, books.take_free())
        books.arrive(number)
    assert books.min_size(1) == 1
    books.lease(2)
    assert books.min_size(1) == 3
    assert books.unlease(2)
    assert books.min_size(1) == 1
