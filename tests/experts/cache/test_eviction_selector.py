"""Who is evicted: the worst that may go, and what was read ahead last of all."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moeflow.experts.cache.eviction import LRU
from moeflow.experts.cache.eviction_selector import EvictionSelector
from moeflow.experts.cache.occupancy import Occupancy

NUM_LAYERS, NUM_EXPERTS = 2, 3
TOTAL = NUM_LAYERS * NUM_EXPERTS


def filled(leased=()):
    books = Occupancy(NUM_LAYERS, NUM_EXPERTS, TOTAL)
    for number in range(TOTAL):
        books.place(number, books.take_free())
        books.arrive(number)
    for number in leased:
        books.lease(number)
    return books


@given(
    uses=st.permutations(range(TOTAL)),
    leased=st.sets(st.integers(0, TOTAL - 1)),
    awaited=arrays.arrays(bool, TOTAL),
    for_demand=st.booleans(),
)
def test_the_least_recently_used_goes_and_what_is_awaited_last(uses, leased, awaited, for_demand):
    victims = EvictionSelector(LRU(TOTAL), NUM_LAYERS, NUM_EXPERTS)
    victims.on_use(np.array(uses))
    may_go = [number for number in uses if number not in leased]
    order = [number for number in may_go if not awaited[number]]
    if for_demand:
        order += [number for number in may_go if awaited[number]]
    assert victims.choose(filled(leased), awaited, for_demand=for_demand) == next(iter(order), None)


def test_the_best_of_a_layer_come_first_and_equal_ones_as_they_lie():
    victims = EvictionSelector(LRU(TOTAL), NUM_LAYERS, NUM_EXPERTS)
    assert victims.best_first(1) == [0, 1, 2]
    victims.on_use(np.array([4, 0]))
    assert victims.best_first(1) == [1, 0, 2]
    assert victims.best_first(0) == [0, 1, 2]


def test_a_scan_looks_ahead_until_the_next_pass():
    victims = EvictionSelector(LRU(TOTAL), NUM_LAYERS, NUM_EXPERTS)
    nobody = np.zeros(TOTAL, bool)
    victims.on_use(np.array([4, 5, 3, 0, 1, 2]))
    assert victims.choose(filled(), nobody, for_demand=True) == 4
    victims.scan_at(0, num_kept=0)
    assert victims.choose(filled(), nobody, for_demand=True) == 0  # the pass has yet to come to layer 1
    victims.begin_pass()
    assert victims.scan is None
    assert victims.choose(filled(), nobody, for_demand=True) == 4
