"""The programme's policy against every policy of a grid, each through the cost model itself."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.errors import CapacityError
from moeflow.core.plan import Policy
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.search.objective import KEPT_SPEED, Objective, cost_per_token, fits
from moeflow.planner.search.search import search_policy as search
from tests.marks import thorough_unless
from tests.planner.examples import SHORT, machine, routing, small_model
from tests.shapes import MIXTRAL

SHARES = [0.0, 0.25, 0.5, 0.75, 1.0]  # of the small model's 8 experts and 4 layers, all are whole numbers
MB = 10**6


def grid(model, max_sequences):
    for mu, count in itertools.product([1, 2, 3, 5, 8, 16], [1, 2, 3, 4, 8]):
        if mu * count > max_sequences or (count > 1 and not model.has_device):
            continue
        fields = {"batch_size": mu * count, "micro_batch": mu}
        if model.has_device:
            yield from device_grid(model, fields)
            continue
        for disk in SHARES:
            yield Policy(attention_on_device=False, ffn_on_device=False, experts_on_disk=disk, **fields)


def device_grid(model, fields):
    for tokens, weights, other in itertools.product((256, 512, 2048), SHARES, SHARES):
        shared = {"weights_on_device": model.resident_share(round(8 * weights)), "chunk_tokens": tokens, **fields}
        if weights < 1 or other < 1:
            yield Policy(attention_on_device=True, ffn_on_device=True, kv_on_device=other, **shared)
        if weights + other <= 1:
            yield Policy(attention_on_device=False, ffn_on_device=other < 1, experts_on_host=other, **shared)


MACHINES = [
    machine(ram=200 * MB),
    machine(ram=60 * MB),
    machine(ram=45 * MB),
    machine(ram=200 * MB, device=850 * MB),
    machine(ram=200 * MB, device=870 * MB, link=1e10),
    machine(ram=85 * MB, device=870 * MB),
    machine(ram=100 * MB, device=850 * MB, link=1e8, num_devices=2),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlap", "number"),
    thorough_unless(
        lambda overlap, number: overlap < 1 or number in (1, 4),
        itertools.product((1.0, 0.3), range(len(MACHINES))),
    ),
)
def test_no_policy_of_an_exhaustive_grid_is_better(number, overlap):
    learnt = routing(decode=(0.03, 0.15, 0.3, 0.6, 0.9), prefill=(0.1, 0.25, 0.4, 0.6, 0.8))
    where = MACHINES[number]
    model = small_model(
        where, routing=learnt, overlap=overlap, prefill_overlap=1 - overlap, num_devices=max(where.num_devices, 1)
    )
    kept = [model.predict(policy) for policy in grid(model, 32) if fits(model, policy, {})]
    exhaustive = {"throughput": min(1 / it.tokens_per_s for it in kept), "latency": min(it.decode_s for it in kept)}
    for goal, least in exhaustive.items():
        policy = search(model, Objective(goal=goal, max_sequences=32))
        assert fits(model, policy, {})
        assert cost_per_token(model, policy, goal) <= least * 1.002


@settings(max_examples=10)
@given(st.integers(40, 300), st.integers(1, 9))
def test_a_number_of_sequences_is_kept_to(ram, num_sequences):
    model = small_model(machine(ram=ram * MB))
    policy = search(model, Objective(num_sequences=num_sequences))
    assert policy.batch_size == num_sequences
    assert fits(model, policy, {})


@pytest.mark.slow
@pytest.mark.parametrize("num_sequences", [1, 7, 50, 101])
def test_a_number_of_sequences_is_kept_to_in_micro_batches(num_sequences):
    model = small_model(machine(ram=200 * MB, device=870 * MB, link=1e10))
    policy = search(model, Objective(num_sequences=num_sequences))
    assert policy.batch_size == num_sequences
    assert fits(model, policy, {})


def test_what_does_not_fit_is_said_with_need_have_and_remedy():
    with pytest.raises(
        CapacityError, match=r"one sequence of 148 tokens needs at least .* \(1.0 MiB available\)\. Take"
    ):
        search(small_model(machine(ram=2**20)), Objective())
    with pytest.raises(CapacityError, match="of device memory"):
        search(small_model(machine(ram=10**12, device=10**6)), Objective())
    with pytest.raises(CapacityError, match="at least"):
        search(small_model(machine(ram=10**12)), Objective(memory_limits={"ram": 10**6}))


def test_less_memory_at_nearly_the_best_speed():
    model = small_model(machine(ram=10**10))
    fast, small = search(model, Objective(max_sequences=64)), search(model, Objective(goal="memory", max_sequences=64))
    assert model.predict(small).memory["ram"] < model.predict(fast).memory["ram"]
    assert model.predict(small).tokens_per_s >= KEPT_SPEED * model.predict(fast).tokens_per_s * 0.999


def test_mixtral_on_one_t4_attends_on_the_host_and_streams_experts_as_in_the_paper():
    model = small_model(load_machine("paper-s1"))
    model = dataclasses.replace(model, costs=dataclasses.replace(model.costs, shape=MIXTRAL), workload=SHORT)
    policy = search(model, Objective())
    assert (policy.attention_on_device, policy.ffn_on_device) == (False, True)
    assert policy.weights_on_device < 0.2
