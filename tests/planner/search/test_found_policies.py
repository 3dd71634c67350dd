"""A policy found by the search is feasible, costs as much as its pipeline's tasks, and names the full resource."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest

from moeflow.core.plan import RESIDENT, Workload
from moeflow.pipeline.catalog import PIPELINES
from moeflow.pipeline.offloading import DEVICE_TO_HOST, HOST, HOST_TO_DEVICE
from moeflow.pipeline.task import COMPUTE
from moeflow.planner.costs.cost_model import DEVICE_COMPUTE, FROM_DEVICE, HOST_COMPUTE, TO_DEVICE, CostModel
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.task_costs import decode_shape, task_cost
from moeflow.planner.described import pipeline_of
from moeflow.planner.figures import policy_map
from moeflow.planner.forecast import forecast
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.search.objective import Objective
from moeflow.planner.search.search import search, search_policy
from moeflow.planner.search.sensitivity import MIN_HELP, bottleneck, bottleneck_by
from tests.planner.examples import HALF, SHORT, machine, small_model
from tests.shapes import MIXTRAL

MB = 10**6
LANES = {DEVICE_COMPUTE: COMPUTE, HOST_COMPUTE: HOST, TO_DEVICE: HOST_TO_DEVICE, FROM_DEVICE: DEVICE_TO_HOST}
MACHINES = {
    "a slow link": machine(ram=200 * MB, device=850 * MB, link=1e8),
    "a link": machine(ram=200 * MB, device=850 * MB),
    "a fast link": machine(ram=200 * MB, device=870 * MB, link=1e10),
    "little memory": machine(ram=85 * MB, device=870 * MB),
    "two devices": machine(ram=100 * MB, device=850 * MB, link=1e8, num_devices=2),
}


def lanes_of(model, policy, name):
    """Return the seconds of each lane in a step, from the tasks of the pipeline that carries a policy out."""
    layers, number, hosted = model.costs.shape.num_layers, policy.num_micro_batches, policy.experts_on_host
    how, context = PIPELINES[name], model.workload.mean_context
    pages = number if how.is_paged else 1
    shape = decode_shape(model.costs, policy.micro_batch, context, num_pages=pages, hosted=hosted)
    lanes = defaultdict(float)
    for task in (how.make_sharing_tasks if hosted else how.make_tasks)(layers, number, is_warm=True, wraps=True):
        lanes[task.lane] += task_cost(task.op, model.machine, shape, policy).seconds
    return lanes


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("goal", ["throughput", "latency"])
def test_a_policy_is_charged_with_the_tasks_of_a_pipeline_that_exists(name, goal):
    where = MACHINES[name]
    model = small_model(where, num_devices=where.num_devices)
    policy = search_policy(model, Objective(goal=goal, max_sequences=32))
    pipeline = pipeline_of(model, policy)
    if pipeline == RESIDENT:
        return
    busy, lanes = model.predict(policy).busy, lanes_of(model, policy, pipeline)
    head = policy.num_micro_batches * 2 * policy.micro_batch * 512 * 1000  # operations; nothing else is a step's own
    head_s = max(head / 1e13, policy.num_micro_batches * 2 * 512 * 1000 / 1e11) / where.num_devices
    lanes[COMPUTE] += head_s
    summed = {TO_DEVICE, FROM_DEVICE} if where.num_devices > 1 else set()  # all-reduces are no task of theirs
    for resource, lane in LANES.items():
        if resource not in summed:
            assert busy[resource] == pytest.approx(lanes[lane], rel=1e-3), resource


def link_and_disk(changed):
    """Return a step that moves 8 GB over the link while 4 GB come from disk: 8 s each on the round machine."""
    link, disk = changed.machine.link("ram", "device"), changed.machine.link("disk", "ram")
    return max(8e9 / link.peak_bytes_per_s, 4e9 / disk.peak_bytes_per_s)


def test_resources_that_are_full_together_are_named_together():
    model = small_model(machine(ram=10**9, device=10**9))
    assert bottleneck_by(link_and_disk, model) == "reading from disk and the link to the device together"
    longer = bottleneck_by(
        lambda it: max(link_and_disk(it), 9e9 / it.machine.link("ram", "device").peak_bytes_per_s), model
    )
    assert longer == "the link to the device"
    assert bottleneck_by(lambda it: 3.0 + 1e-3 * link_and_disk(it), model) == "the time between kernels"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["l4", "h100", "h200", "paper-s1"])
def test_every_resource_named_is_full_and_nothing_full_is_left_out(name):
    workload = Workload(prompt_len=418, gen_len=128, max_prompt_len=418)
    model = CostModel(load_machine(name), ModelCosts(MIXTRAL, HALF), workload)
    policy = search_policy(model, Objective(), 1.5)
    prediction, named = model.predict(policy), bottleneck(model, policy)
    names = {
        "host": ("reading from RAM", "arithmetic"),
        "device": ("reading from device memory", "arithmetic on the device"),
        "link to device": ("the link to the device",),
    }
    full = {name for name in names if prediction.busy[name] > prediction.decode_s / MIN_HELP}
    words = set(named.removesuffix(" together").replace(" and ", ", ").split(", "))
    found = {name for name, its in names.items() if words & set(its)}
    assert found == full or (found and not full)  # none is full where tasks wait for each other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "objective"),
    [
        (machine(ram=10**9, device=850 * MB), Objective(max_sequences=64)),
        (machine(ram=10**9, device=850 * MB), Objective(goal="latency", max_sequences=16)),
        (machine(ram=10**9, device=850 * MB, num_devices=2), Objective(max_sequences=16)),
        (machine(ram=10**9, device=850 * MB), Objective(max_sequences=16, memory_limits={"ram": 90 * MB})),
    ],
)
def test_the_map_of_policies_has_the_plan_itself_at_its_centre(where, objective, monkeypatch):
    monkeypatch.setattr(policy_map, "FACTORS", (1.0, 2.0))
    model = small_model(where, workload=dataclasses.replace(SHORT, gen_len=30))
    found, planned = search(model, objective)
    made = policy_map.policy_map(model, objective)
    centre = next(point for point in made.points if point.x == point.y == 1.0)
    assert centre.policy == planned
    assert centre.tokens_per_s == found.predict(planned).tokens_per_s


@pytest.mark.slow
def test_the_time_to_the_first_token_of_all_at_once_is_that_of_all_prompts():
    model = small_model(machine(ram=10**9, device=850 * MB))
    made = forecast(*search(model, Objective(max_sequences=64)), {})
    prediction = model.predict(made.policy)
    assert made.all_prompts_s.value == pytest.approx(prediction.prefill_s)
    assert made.all_prompts_s.low == pytest.approx(prediction.prefill_s / (1 + model.machine.uncertainty))
    assert made.time_to_first_token_s.value == prediction.first_token_s < prediction.prefill_s
