"""Each policy against its plain definition on lists."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.experts.cache.eviction import FIFO, LFRU, LFU, LRU, Belady, lowest
from moeflow.experts.cache.policies import POLICIES

NUM_LAYERS = 2
NUM_EXPERTS = 6  # of both layers
traces = st.lists(st.integers(0, NUM_EXPERTS - 1), max_size=60)
HALF_LIFE = 4


def replay(policy, uses, num_slots, on_evict=lambda victim, resident, now: None):
    """Serve `uses` one a pass from a cache, and return how many loads it took."""
    resident = np.zeros(NUM_EXPERTS, bool)
    num_loads = 0
    for now, expert in enumerate(uses):
        policy.on_use(np.array([expert]), now)
        if resident[expert]:
            continue
        if resident.sum() == num_slots:
            victim = lowest(policy.scores(now), resident)
            on_evict(victim, {int(other) for other in np.flatnonzero(resident)}, now)
            resident[victim] = False
        resident[expert] = True
        policy.on_load(expert)
        num_loads += 1
    return num_loads


def last(items, item):
    return max((position for position, other in enumerate(items) if other == item), default=-1)


def decayed(expert, past):
    return sum(2.0 ** ((at - len(past)) / HALF_LIFE) for at, other in enumerate(past) if other == expert)


# what an expert is worth, given all uses up to now and all loads
PLAIN = {
    "fifo": (FIFO, lambda expert, past, loads: last(loads, expert)),
    "lru": (LRU, lambda expert, past, loads: last(past, expert)),
    "lfu": (lambda n: LFU(n, HALF_LIFE), lambda expert, past, loads: decayed(expert, past)),
    "lfru": (
        lambda n: LFRU(n, HALF_LIFE),
        lambda expert, past, loads: decayed(expert, past) / (len(past) - last(past, expert)),
    ),
}


def test_the_plain_definitions_cover_all_policies():
    assert {*PLAIN, "next-use"} == set(POLICIES)  # that one: test_next_use.py


@pytest.mark.parametrize("name", PLAIN)
@given(uses=traces, num_slots=st.integers(1, 5))
@settings(max_examples=60)
def test_policies_evict_whom_their_definition_says(name, uses, num_slots):
    make, worth = PLAIN[name]
    loads = []

    def on_evict(victim, resident, now):
        loads.extend(expert for expert in dict.fromkeys(uses[:now]) if expert not in loads)  # while there was space
        values = {expert: worth(expert, uses[: now + 1], loads) for expert in resident}
        assert values[victim] == pytest.approx(min(values.values()), rel=1e-9)
        loads.append(uses[now])

    replay(make(NUM_EXPERTS), uses, num_slots, on_evict)


@given(uses=st.lists(st.integers(0, 3), max_size=9), num_slots=st.integers(1, 3))
@settings(max_examples=60)
def test_belady_is_the_best_of_all_ways(uses, num_slots):
    def fewest_loads(position, resident):
        for here in range(position, len(uses)):
            if uses[here] in resident:
                continue
            if len(resident) < num_slots:
                return 1 + fewest_loads(here + 1, resident | {uses[here]})
            ways = (resident - {victim} | {uses[here]} for victim in resident)
            return 1 + min(fewest_loads(here + 1, way) for way in ways)
        return 0

    num_loads = replay(Belady(NUM_EXPERTS, uses), uses, num_slots)
    assert num_loads == fewest_loads(0, frozenset())


@given(uses=traces, num_slots=st.integers(1, 5))
@settings(max_examples=60)
def test_no_policy_beats_belady(uses, num_slots):
    best = replay(Belady(NUM_EXPERTS, uses), uses, num_slots)
    assert all(
        best <= replay(make(NUM_LAYERS, NUM_EXPERTS // NUM_LAYERS), uses, num_slots) for make in POLICIES.values()
    )


def test_what_may_not_be_evicted_is_not():
    policies = [make(NUM_LAYERS, NUM_EXPERTS // NUM_LAYERS) for make in POLICIES.values()]
    for policy, expert in itertools.product(policies, range(NUM_EXPERTS)):
        policy.on_load(expert)
        policy.on_use(np.array([expert]), expert)
    only = np.zeros(NUM_EXPERTS, bool)
    only[4] = True
    assert [lowest(policy.scores(9), only) for policy in policies] == [4] * len(policies)


def test_counts_of_a_long_run_do_not_overflow():
    policy = LFRU(NUM_EXPERTS, HALF_LIFE)
    for now in (0, 10**7):
        policy.on_use(np.array([0]), now)
    policy.on_use(np.array([1]), 10**7)
    scores = policy.scores(10**7)
    assert np.isfinite(scores).all()
    assert scores[0] == pytest.approx(scores[1])
