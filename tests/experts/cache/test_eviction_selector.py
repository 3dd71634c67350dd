"""The selector evicts the worst evictable expert, and prefetched ones last of all."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.eviction import LRU
from moeflow.experts.cache.eviction_selector import EvictionSelector
from moeflow.experts.cache.expert_states import ExpertStates

NUM_LAYERS, NUM_EXPERTS = 2, 3
TOTAL = NUM_LAYERS * NUM_EXPERTS


def filled(leased=(), awaited=()):
    states = ExpertStates(NUM_LAYERS, NUM_EXPERTS, TOTAL, slab_bytes=1, stats=CacheStats(), on_dropped=lambda: None)
    for number in range(TOTAL):
        states.end_load(states.begin_load(number, states.take_free(), is_prefetch=number in awaited), None)
    for number in leased:
        states.lease(states.all[number])
    return states


@given(
    uses=st.permutations(range(TOTAL)),
    leased=st.sets(st.integers(0, TOTAL - 1)),
    awaited=st.sets(st.integers(0, TOTAL - 1)),
    for_demand=st.booleans(),
)
def test_the_least_recently_used_goes_and_what_is_awaited_last(uses, leased, awaited, for_demand):
    victims = EvictionSelector(LRU(TOTAL), NUM_LAYERS, NUM_EXPERTS)
    victims.on_use(np.array(uses))
    may_go = [number for number in uses if number not in leased]
    order = [number for number in may_go if number not in awaited]
    if for_demand:
        order += [number for number in may_go if number in awaited]
    assert victims.choose(filled(leased, awaited), for_demand=for_demand) == next(iter(order), None)


def test_the_best_of_a_layer_come_first_and_equal_ones_as_they_lie():
    victims = EvictionSelector(LRU(TOTAL), NUM_LAYERS, NUM_EXPERTS)
    assert victims.best_first(1) == [0, 1, 2]
    victims.on_use(np.array([4, 0]))
    assert victims.best_first(1) == [1, 0, 2]
    assert victims.best_first(0) == [0, 1, 2]


def test_a_scan_looks_ahead_until_the_next_pass():
    victims = EvictionSelector(LRU(TOTAL), NUM_LAYERS, NUM_EXPERTS)
    victims.on_use(np.array([4, 5, 3, 0, 1, 2]))
    assert victims.choose(filled(), for_demand=True) == 4
    victims.scan_at(0, num_kept=0)
    assert victims.choose(filled(), for_demand=True) == 0  # the pass has yet to come to layer 1
    victims.begin_pass()
    assert victims.scan is None
    assert victims.choose(filled(), for_demand=True) == 4


def test_a_scan_keeps_an_equal_share_of_each_layer():
    victims = EvictionSelector(LRU(TOTAL), NUM_LAYERS, NUM_EXPERTS)
    victims.scan_at(0, num_kept=5)
    assert (victims.scan.layer, victims.scan.kept_of_layer) == (0, 2)
    victims.scan_at(1, num_kept=0)
    assert (victims.scan.layer, victims.scan.kept_of_layer) == (1, 2)  # the share of a pass does not change
