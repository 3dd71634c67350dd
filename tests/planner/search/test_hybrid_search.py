"""A device that is smaller than the model holds as many experts as fit, and the host computes the others."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.plan import HYBRID, RESIDENT
from moeflow.planner.costs.hybrid_costs import HybridCosts, hybrid_policy_of
from moeflow.planner.costs.hybrid_sizes import Passes
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.described import pipeline_of
from moeflow.planner.search.hybrid_search import hybrid_policy, search_hybrid
from moeflow.planner.search.objective import Objective, cost_per_token
from moeflow.planner.search.search import search
from moeflow.planner.search.sensitivity import helps
from tests.planner.examples import HALF, SHORT, SMALL, machine

MB, GB = 10**6, 10**9
MANY = ModelCosts(SMALL.with_fields(num_layers=16, num_experts=64, top_k=4, intermediate_size=256), HALF)


def model(device: int, ram: int = 10 * GB, **others) -> HybridCosts:
    where = machine(ram=ram, device=device, link=1e9, **others)
    return HybridCosts(where, MANY, SHORT, process_bytes=0, host_format="bfloat16")


def fits(costs: HybridCosts, number: int, num_gpu_experts: int) -> bool:
    used = costs.memory_of(hybrid_policy_of(costs.costs, number, num_gpu_experts))
    return all(used[tier] <= costs.machine.level(tier).capacity_bytes for tier in (DEVICE, RAM))


@pytest.mark.parametrize("device", [1000 * MB, 1100 * MB, 1400 * MB])
@pytest.mark.parametrize("number", [1, 7, 400])
def test_as_many_experts_as_fit_are_on_the_device(device, number):
    costs = model(device)
    most = max((it for it in range(64) if fits(costs, number, it)), default=None)
    found = hybrid_policy(costs, Objective(), number)
    assert found == (
        None if most is None else hybrid_policy_of(costs.costs, number, costs.best_gpu_experts(number, most))
    )


@pytest.mark.parametrize("goal", ["throughput", "latency", "memory"])
def test_the_best_number_of_sequences_is_found(goal):
    costs, objective = model(1200 * MB), Objective(goal=goal, max_sequences=30)
    found = search_hybrid(costs, objective, 1.01)
    tried = [it for number in range(1, 31) if (it := hybrid_policy(costs, objective, number))]
    cost = "latency" if goal == "latency" else "throughput"
    best = min(cost_per_token(costs, policy, cost) for policy in tried)
    enough = next(policy for policy in tried if cost_per_token(costs, policy, cost) <= best / 0.9)
    assert found == enough if goal == "memory" else cost_per_token(costs, found, cost) == best


def test_a_device_that_holds_the_model_keeps_it_and_a_smaller_one_shares_it():
    objective = Objective(goal="latency", num_sequences=1)
    pipelines = [pipeline_of(*search(model(device), objective, 2.0)) for device in (1200 * MB, 2000 * MB)]
    assert pipelines == [HYBRID, RESIDENT]


@pytest.mark.parametrize("goal", ["throughput", "latency"])
def test_more_device_memory_is_never_slower(goal):
    objective = Objective(goal=goal, num_sequences=4, can_stream=False)
    costs = [
        cost_per_token(*search(model(device), objective, 2.0), goal) for device in range(1100 * MB, 2000 * MB, 40 * MB)
    ]
    assert costs == sorted(costs, reverse=True)


def test_several_devices_share_no_experts_with_the_host():
    several = dataclasses.replace(model(1200 * MB, num_devices=2), num_devices=2)
    assert search_hybrid(several, Objective(), 2.0) is None


def test_a_machine_without_room_says_what_it_lacks():
    objective = Objective(num_sequences=1, can_stream=False)
    with pytest.raises(CapacityError, match=r"the model needs .* of memory, but there are .*--quantize int4") as error:
        search(model(1200 * MB, ram=100 * MB), objective, 2.0)
    assert "device memory" not in str(error.value)
    with pytest.raises(CapacityError, match=r"needs .* of device memory, but there are .* and .* of memory, but"):
        search(model(300 * MB, ram=100 * MB), objective, 2.0)


def test_main_memory_has_as_many_slots_as_fit_and_more_memory_helps():
    objective, sizes = Objective(goal="latency", num_sequences=1), model(1200 * MB).sizes
    all_bytes, rings = sizes.host_bytes(Passes(0, 0)), sizes.host_bytes(Passes(2048, 1), 0)
    speeds, numbers = [], []
    for ram in (rings + all_bytes // 4, rings + all_bytes // 2, 2 * rings + all_bytes):
        costs, policy = search(model(1200 * MB, ram), objective, 2.0)
        assert costs.memory_of(policy)[RAM] <= ram
        numbers.append(costs.num_host_slots)
        speeds.append(1 / costs.predict(policy).decode_s)
        absent = 1 - policy.num_gpu_experts / 64 - (numbers[-1] or 1024) / 1024
        assert policy.experts_on_disk == pytest.approx(max(absent, 0))
    assert numbers == [256, 512, None]
    assert speeds == sorted(speeds)
    assert speeds[0] < speeds[1]
    assert "twice the memory" in {it.change for it in helps(model(1200 * MB, rings + all_bytes // 4), objective)}
    without_disk = dataclasses.replace(
        model(1200 * MB, rings + all_bytes // 2), machine=no_disk(rings + all_bytes // 2)
    )
    with pytest.raises(CapacityError, match="of memory, but there are"):
        search(without_disk, dataclasses.replace(objective, can_stream=False), 2.0)


def no_disk(ram: int):
    where = machine(ram=ram, device=1200 * MB, link=1e9)
    levels = tuple(level for level in where.levels if level.name != "disk")
    links = tuple(link for link in where.links if "disk" not in (link.source, link.target))
    return dataclasses.replace(where, levels=levels, links=links)
