"""Traffic on the virtual clock: a queue worked out by hand, bounds, and the order of policies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.errors import CapacityError
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.planner.costs.cost_model import HOST_COMPUTE, CostModel, IntegerPolicy
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.roofline import work_seconds
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.simulator.serve_run import block_count, pass_seconds_of, serve_virtually
from moeflow.workload.poisson import Arrival, WorkloadSpec, make_arrivals
from tests.planner.examples import HALF, SHORT, SMALL, machine
from tests.shapes import MIXTRAL

COSTS = ModelCosts(SMALL, HALF)


def config(policy="continuous", **more):
    return SchedulerConfig(**{"num_blocks": 400, "max_model_len": 64, "max_num_seqs": 4, "policy": policy, **more})


def test_one_after_another_when_one_place_is_all_there_is():
    arrivals = [Arrival(0.0, [1] * 8, 3), Arrival(1.0, [2] * 8, 2), Arrival(20.0, [3] * 8, 1)]
    served = serve_virtually(arrivals, config(max_num_seqs=1), lambda _: 2.0)
    assert [(one.first_s, one.end_s) for one in served] == [(2, 6), (8, 10), (22, 22)]


def test_who_comes_during_a_pass_joins_the_next():
    arrivals = [Arrival(0.0, [1] * 8, 4), Arrival(1.0, [2] * 8, 2)]
    served = serve_virtually(arrivals, config(), lambda _: 2.0)
    assert [(one.first_s, one.end_s) for one in served] == [(2, 8), (4, 6)]


def test_a_static_batch_waits_to_fill_and_runs_to_its_longest_answer():
    arrivals = [Arrival(0.0, [1] * 8, 1), Arrival(0.5, [2] * 8, 3), Arrival(2.0, [3] * 8, 1)]
    served = serve_virtually(arrivals, config("static", batch_timeout_s=1.0), lambda _: 2.0)
    assert [(one.first_s, one.end_s) for one in served] == [(3, 3), (3, 7), (9, 9)]


@given(st.integers(0, 99), st.sampled_from(["continuous", "static"]), st.floats(0.5, 50))
@settings(max_examples=15)
def test_all_are_served_and_nothing_before_its_time(seed, policy, rate):
    spec = WorkloadSpec(rate=rate, num_requests=12, max_prompt=20, max_new=10, vocab_size=9, seed=seed)
    arrivals = make_arrivals(spec)
    served = serve_virtually(arrivals, config(policy), lambda batch: 0.01 + 0.001 * batch.num_tokens)
    assert [one.arrival for one in served] == arrivals
    for one in served:
        fastest_s = 0.01 + 0.001 * len(one.arrival.prompt_token_ids)
        assert one.first_s >= one.arrival.at_s + fastest_s - 1e-9
        assert one.end_s >= one.first_s + (one.arrival.num_new - 1) * 0.011 - 1e-9


def test_continuous_batching_is_ahead_of_static():
    spec = WorkloadSpec(rate=1000.0, num_requests=60, max_prompt=20, max_new=40, vocab_size=9)
    arrivals, spans = make_arrivals(spec), {}
    for policy in ("continuous", "static"):
        served = serve_virtually(
            arrivals, config(policy, max_num_seqs=8), lambda batch: 0.01 + 0.001 * batch.num_tokens
        )
        spans[policy] = max(one.end_s for one in served)
    assert spans["static"] > 1.3 * spans["continuous"]


def batch(*shares):
    requests = [Request("", [1] * stop, SamplingParams(), 9) for _, stop in shares]
    return Batch(
        tuple(
            BatchEntry(request, start, stop - start, (), samples=True)
            for request, (start, stop) in zip(requests, shares, strict=True)
        )
    )


def test_a_pass_of_decodes_takes_the_sum_of_its_stages():
    h100 = load_machine("h100")
    context = 110
    seconds = pass_seconds_of(h100, COSTS)(batch(*[(context, context + 1)] * 8))
    device = h100.level("device")
    stages = [COSTS.pre_attention(8), COSTS.decode_attention(8, context + 1), COSTS.output_projection(8)]
    works = [(4, work) for work in stages] + COSTS.feed_forward(8) + [(1, COSTS.head(8))]
    expected = sum(count * work_seconds(device, work) for count, work in works)
    assert seconds == pytest.approx(expected + device.processor.pass_s + 8 * device.processor.token_s)


def test_a_pass_of_a_host_takes_what_the_planner_says():
    """With what passes through operations on rows, which a host does one after another."""
    host = machine(ram=2**34)
    seconds = pass_seconds_of(host, COSTS)(batch(*[(110, 111)] * 8))
    step = CostModel(host, COSTS, replace(SHORT, gen_len=21)).decode(IntegerPolicy(8, 1, False))
    assert seconds == pytest.approx(step[HOST_COMPUTE].const)


def test_prompts_cost_more_than_tokens_and_later_chunks_more_than_first_ones():
    seconds = pass_seconds_of(load_machine("t4"), ModelCosts(MIXTRAL, HALF))
    assert seconds(batch((0, 4000))) > seconds(batch((3999, 4000)))
    assert seconds(batch((4000, 8000))) > seconds(batch((0, 4000)))


def test_a_model_that_does_not_fit_is_refused_with_what_would_help():
    with pytest.raises(CapacityError, match="moeflow simulate pipeline"):
        block_count(load_machine("t4"), ModelCosts(MIXTRAL, HALF), 16)
    assert block_count(load_machine("h200"), ModelCosts(MIXTRAL, HALF), 16) > 1000


def throughput(num_replicas: int, num_requests: int = 300) -> float:
    spec = WorkloadSpec(rate=1e3, num_requests=num_requests, max_prompt=20, max_new=20, vocab_size=9, seed=3)
    served = serve_virtually(make_arrivals(spec), config(), lambda batch: 0.01 + 1e-4 * batch.num_tokens, num_replicas)
    return num_requests / max(one.end_s for one in served)


def test_two_engines_on_two_machines_bring_nearly_twice_as_much_at_saturation():
    assert 1.9 < throughput(2) / throughput(1) <= 2.001
    assert 3.6 < throughput(4) / throughput(1) <= 4.001


def test_requests_wait_for_whoever_is_free_first():
    """Two of one place each: the third, whose turn it would be at the first, goes to the second."""
    arrivals = [Arrival(0.0, [1] * 8, 9), Arrival(0.0, [2] * 8, 2), Arrival(0.0, [3] * 8, 2)]
    served = serve_virtually(arrivals, config(max_num_seqs=1), lambda _: 1.0, num_replicas=2)
    assert [(one.first_s, one.end_s) for one in served] == [(1, 9), (1, 2), (3, 4)]


@given(st.integers(0, 99), st.integers(1, 4), st.floats(0.5, 500))
@settings(max_examples=15)
def test_several_engines_serve_all_and_none_later_than_one_would_all(seed, num_replicas, rate):
    spec = WorkloadSpec(rate=rate, num_requests=12, max_prompt=20, max_new=10, vocab_size=9, seed=seed)
    arrivals = make_arrivals(spec)
    alone, several = (serve_virtually(arrivals, config(), lambda _: 0.5, number) for number in (1, num_replicas))
    assert [one.arrival for one in several] == arrivals
    assert max(one.end_s for one in several) <= max(one.end_s for one in alone) + 0.5  # a pass may just have begun
