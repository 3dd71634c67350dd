"""Found policies are named by what bounds them, and what would help is weighed."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.errors import CapacityError
from moeflow.planner.forecast import expert_places, forecast
from moeflow.planner.search.objective import Objective
from moeflow.planner.search.search import search, search_policy
from moeflow.planner.search.sensitivity import bottleneck, helps
from tests.planner.examples import SHORT, machine, small_model

pytestmark = pytest.mark.slow  # each plans several times

MB = 10**6
IN_MEMORY = small_model(machine(ram=10**9))
STREAMED = small_model(machine(ram=45 * MB), overlap=0.0, prefill_overlap=0.5)
OFFLOADED = small_model(machine(ram=10**9, device=850 * MB))


@pytest.mark.parametrize("model", [IN_MEMORY, STREAMED, OFFLOADED])
def test_a_forecast_is_of_the_policy_that_was_found(model):
    model, policy = search(model, Objective(max_sequences=64))
    made, prediction = forecast(model, policy, {}), model.predict(policy)
    assert made.tokens_per_s.low < made.tokens_per_s.value == pytest.approx(prediction.tokens_per_s)
    assert {used.tier for used in made.memory} == {tier for tier, size in prediction.memory.items() if size}
    assert all(used.peak_bytes.value <= used.capacity_bytes * 1.001 for used in made.memory)
    assert dict(made.busy) == pytest.approx(
        {n: it / prediction.decode_s for n, it in prediction.busy.items()}, abs=1e-4
    )
    assert sum(share for _, share in made.expert_places) == pytest.approx(1)


def test_the_bottleneck_is_what_more_of_would_help():
    assert bottleneck(IN_MEMORY, search_policy(IN_MEMORY, Objective(num_sequences=1))) == "reading from RAM"
    objective = Objective(goal="latency")
    assert bottleneck(*search(STREAMED, objective)) == "reading from disk"
    found = helps(STREAMED, objective)
    assert any(help_.change == "twice the memory" and help_.speedup > 1.5 for help_ in found)
    assert [help_.speedup for help_ in found] == sorted((it.speedup for it in found), reverse=True)


@pytest.mark.parametrize(("weights", "on_disk"), [(0.4, 0.3), (0.9, 0.1), (0.01, 0.98)])
def test_experts_are_each_in_one_place(weights, on_disk):
    policy = dataclasses.replace(
        search_policy(OFFLOADED, Objective(max_sequences=8)), weights_on_device=weights, experts_on_disk=on_disk
    )
    places, costs = dict(expert_places(OFFLOADED, policy)), OFFLOADED.costs
    assert places["disk"] == on_disk
    assert sum(places.values()) == pytest.approx(1)
    outside = costs.layers_bytes - costs.experts_bytes  # which takes the device's memory first
    on_device = max(weights * costs.layers_bytes - outside, 0)
    assert places["device"] * costs.experts_bytes == pytest.approx(on_device, rel=1e-3)


def test_experts_of_a_host_are_in_memory_or_on_disk():
    _, policy = search(IN_MEMORY, Objective(max_sequences=8))
    assert dict(expert_places(IN_MEMORY, policy)) == {"ram": 1.0, "disk": 0.0}
    shape = IN_MEMORY.costs.shape.with_fields(num_experts=0, top_k=0)
    dense = dataclasses.replace(IN_MEMORY, costs=dataclasses.replace(IN_MEMORY.costs, shape=shape))
    assert expert_places(*search(dense, Objective(max_sequences=8))) == ()


def test_a_limit_on_memory_is_kept_and_doubling_it_is_weighed():
    objective = Objective(max_sequences=8, memory_limits={"ram": 45 * MB})
    model, policy = search(IN_MEMORY, objective)
    assert policy.experts_on_disk > 0
    assert forecast(model, policy, objective.memory_limits).memory[0].capacity_bytes == 45 * MB
    assert "twice the memory" in {help_.change for help_ in helps(IN_MEMORY, objective)}


def test_latency_takes_one_sequence_or_as_few_as_keep_up_with_arrivals():
    latency = Objective(goal="latency")
    model, alone = search(IN_MEMORY, latency)
    assert alone.batch_size == 1
    served = model.predict(alone).tokens_per_s / SHORT.gen_len
    busy = dataclasses.replace(IN_MEMORY, workload=dataclasses.replace(SHORT, rate=served * 1.5))
    model, several = search(busy, latency)
    assert several.batch_size > 1
    assert model.predict(several).tokens_per_s / SHORT.gen_len >= served * 1.5
    too_many = dataclasses.replace(IN_MEMORY, workload=dataclasses.replace(SHORT, rate=served * 1e3))
    with pytest.raises(CapacityError, match="requests a second are wanted, but this machine answers"):
        search(too_many, Objective(goal="latency", max_sequences=32))


def test_what_does_not_fit_anywhere_is_refused():
    with pytest.raises(CapacityError, match="at least"):
        search(small_model(machine(ram=MB)), Objective())
