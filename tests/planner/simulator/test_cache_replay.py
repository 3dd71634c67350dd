"""Replays against brute force where there is one, and against what must hold of any cache and disk."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.errors import ConfigError
from moeflow.planner.simulator.cache_replay import POLICY_NAMES, ReplayCase, ReplayMachine, replay
from moeflow.planner.simulator.replayed_passes import ReplayedPass, prepare_passes
from moeflow.planner.simulator.replayed_sources import PREDICTOR_NAMES
from moeflow.workload.routing_trace import RoutingTrace
from tests.marks import thorough_unless
from tests.planner.simulator.traces import make_trace, named_in, with_routers_ahead

MACHINE = ReplayMachine(disk_bytes_per_s=1e9, slab_bytes=1_000_000)  # a read takes 1 ms


def run(trace, num_slots, policy="lru", predictor="none", *, machine=MACHINE, compute_s=None, named=()):
    return replay(
        prepare_passes(trace, compute_s, named), trace.header, machine, ReplayCase(num_slots, policy, predictor)
    )


def lru_misses(trace, num_slots):
    """LRU with a list; a layer's experts are used in ascending order and cannot evict one another."""
    order, misses = [], 0
    for routed in trace.passes:
        for layer, ids in enumerate(routed.ids):
            needed = [(layer, int(expert)) for expert in sorted(set(ids.ravel()))]
            misses += sum(expert not in order for expert in needed)
            order = [expert for expert in order if expert not in needed] + needed
            order = order[-num_slots:]
    return misses


@given(
    num_slots=st.integers(8, 70),
    num_tokens=st.integers(1, 4),
    stay=st.sampled_from([0.0, 0.5, 0.9]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8)
def test_lru_counts_are_those_of_a_list(num_slots, num_tokens, stay, seed):
    trace = make_trace(20, num_tokens=num_tokens, stay=stay, seed=seed)
    result = run(trace, num_slots)
    assert result.stats.misses == lru_misses(trace, num_slots)
    assert result.stats.demand_bytes == result.stats.misses * 1_000_000


@pytest.mark.parametrize("predictor", PREDICTOR_NAMES)
@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("num_slots", thorough_unless(lambda it: it in (2, 9), (2, 3, 9, 64)))
def test_time_is_computing_and_waiting_and_no_read_is_lost(num_slots, policy, predictor):
    trace = with_routers_ahead(make_trace(30, num_tokens=3))
    result = run(trace, num_slots, policy, predictor, named=named_in(trace))
    stats = result.stats
    assert result.seconds == pytest.approx(30 * 0.01 + result.stats.stall_s)
    assert result.tokens_per_s == pytest.approx(90 / result.seconds)
    assert stats.hits + stats.late + stats.misses == sum(
        len(set(ids.ravel())) for routed in trace.passes for ids in routed.ids
    )
    read_s = (stats.demand_bytes + stats.prefetched_bytes) / MACHINE.disk_bytes_per_s
    assert read_s <= result.seconds + 1e-3  # the last prefetch may go on
    assert result.stats.stall_s <= read_s + 1e-9
    if predictor == "none":
        assert stats.prefetched_bytes == 0
        assert result.prefetching_share == 0


def test_what_fits_is_read_once():
    trace = make_trace(50)
    result = run(trace, 64)
    used = {(layer, int(e)) for routed in trace.passes for layer, ids in enumerate(routed.ids) for e in ids.ravel()}
    assert result.stats.misses == len(used)
    assert result.stats.evictions == 0


@pytest.mark.parametrize("num_slots", [8, 16, 32])
def test_no_policy_beats_belady(num_slots):
    trace = make_trace(60)
    best = run(trace, num_slots, "belady").stats.misses
    others = [run(trace, num_slots, policy).stats.misses for policy in POLICY_NAMES]
    assert best <= min(others)
    assert best < max(others)


def test_a_perfect_predictor_hides_reads_behind_computing():
    trace = make_trace(60, compute_s=0.1)
    alone, helped = (run(trace, 16, predictor=name) for name in ("none", "perfect"))
    assert helped.stats.stall_s < 0.2 * alone.stats.stall_s
    assert helped.prefetching_share == 1


def test_drafting_on_a_busy_disk_is_switched_off():
    trace = make_trace(700, stay=0.05, num_experts=32, compute_s=0.001)
    alone, drafted = (run(trace, 12, predictor=name) for name in ("none", "frequency"))
    assert drafted.prefetching_share < 0.7
    assert drafted.seconds < 1.1 * alone.seconds


def test_by_hand():
    """One layer, two slots: times of computing and waiting, to the millisecond."""
    trace = make_trace(0, num_layers=1, num_experts=4)
    by_hand = [ReplayedPass(np.array([[[one], [other]]]), 1, 0.004) for one, other in ((0, 1), (0, 2), (2, 3))]
    result = replay(by_hand, trace.header, MACHINE, ReplayCase(2, "lru", "none"))
    # pass 1: 0 arrives after 1 ms, is computed until 3. Expert 1 is there since 2, computed until 5.
    # pass 2: 0 until 7, while 2 arrives; until 9. pass 3: 2 until 11, 3 is there; until 13.
    assert result.seconds == pytest.approx(0.013)
    assert result.stats.stall_s == pytest.approx(0.001)


def test_recorded_times_are_used_unless_others_are_given():
    trace = make_trace(10, compute_s=0.25)
    assert run(trace, 64).seconds == pytest.approx(2.5, abs=0.1)
    assert run(trace, 64, compute_s=0.5).seconds == pytest.approx(5, abs=0.1)


def test_traces_that_say_too_little_are_refused():
    trace = make_trace(3, compute_s=0)
    with pytest.raises(ConfigError, match="--compute-time"):
        prepare_passes(trace, None)
    with pytest.raises(ConfigError, match="no passes"):
        prepare_passes(RoutingTrace(trace.header, [], 0), 1)
    with pytest.raises(ConfigError, match="1 slots are too few"):
        run(trace, 1, compute_s=1)


def test_the_same_trace_gives_the_same_numbers():
    trace = with_routers_ahead(make_trace(40))
    for policy, predictor in itertools.product(POLICY_NAMES, PREDICTOR_NAMES):
        assert run(trace, 12, policy, predictor, named=named_in(trace)) == run(
            trace, 12, policy, predictor, named=named_in(trace)
        )


def test_routers_that_are_right_hide_reads_and_more_so_from_further_ahead():
    trace = with_routers_ahead(make_trace(1200, num_layers=8, stay=0.2))
    names = ("none", "next-router", "next-router:2", "next-router:4")
    results = [run(trace, 32, predictor=name, compute_s=0.008) for name in names]  # a layer computes as long as a read
    stalls = [result.stats.stall_s for result in results]
    assert all(result.prefetching_share > 0.85 for result in results[1:])
    assert stalls[1] < 0.5 * stalls[0]
    assert stalls[3] <= stalls[2] < 0.95 * stalls[1]


@pytest.mark.parametrize("name", ["sida", "combined"])
def test_a_network_that_is_right_hides_reads_from_the_beginning_of_a_pass(name):
    trace = make_trace(600, num_layers=8, stay=0.2)
    routers = run(with_routers_ahead(trace), 32, predictor="next-router", compute_s=0.008)
    helped = run(trace, 32, predictor=name, compute_s=0.008, named=named_in(trace))
    assert helped.prefetching_share > 0.75
    assert helped.stats.stall_s < 0.85 * routers.stats.stall_s


def test_what_a_trace_does_not_tell_is_said():
    with pytest.raises(ConfigError, match="--model"):
        run(make_trace(3), 8, predictor="sida")
    with pytest.raises(ConfigError, match="needs routers"):
        run(make_trace(3), 8, predictor="next-router:2")
