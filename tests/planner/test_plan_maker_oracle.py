"""What more of each resource would bring, with costs that depend on one resource alone; where experts lie."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, DISK, RAM
from moeflow.core.plan import Policy
from moeflow.planner.plan_maker import SearchResult, describe, expert_places, helps_by, pipeline_of
from moeflow.planner.policy_search import Objective
from tests.planner.examples import machine, small_model

HOST = small_model(machine(ram=10**9))
DEVICE_MODEL = small_model(machine(ram=10**9, device=10**9))
POLICY = Policy(
    batch_size=6,
    micro_batch=3,
    attention_on_device=True,
    ffn_on_device=True,
    weights_on_device=0.6,
    kv_on_device=0.5,
    experts_on_disk=0.1,
)


def processor(level, field="peak_flops_per_s"):
    found = getattr(level.processor, field)
    return dict(found)["float32"] if field == "peak_flops_per_s" else found


# What a step costs, in something of the machine, and the change that would halve it.
ONE_RESOURCE = {
    "RAM that is read twice as fast": lambda it: 1 / it.level(RAM).read_bytes_per_s,
    "a processor that computes twice as fast": lambda it: 1 / processor(it.level(RAM)),
    "twice the memory": lambda it: 1 / it.level(RAM).capacity_bytes,
    "a disk that is read twice as fast": lambda it: it.link(DISK, RAM).seconds(1e6),
    "device memory that is read twice as fast": lambda it: 1 / it.level(DEVICE).read_bytes_per_s,
    "a device that computes twice as fast": lambda it: 1 / processor(it.level(DEVICE)),
    "twice the device memory": lambda it: 1 / it.level(DEVICE).capacity_bytes,
    "a link to the device twice as fast": lambda it: it.link(RAM, DEVICE).seconds(1e6),
}


@pytest.mark.parametrize("change", ONE_RESOURCE)
def test_twice_as_much_of_what_bounds_halves_the_cost(change):
    def cost(model, objective):
        return ONE_RESOURCE[change](model.machine)

    assert [(it.change, it.speedup) for it in helps_by(cost, DEVICE_MODEL, Objective())] == [(change, 2.0)]


def test_the_way_back_and_overheads_come_with_link_and_processor():
    def both_ways(model, objective):
        return model.machine.link(RAM, DEVICE).seconds(1e6) + model.machine.link(DEVICE, RAM).seconds(1e6)

    (link,) = helps_by(both_ways, DEVICE_MODEL, Objective())
    assert (link.change, link.speedup) == ("a link to the device twice as fast", 2.0)

    def overheads(model, objective):
        level = model.machine.level(RAM)
        return processor(level, "pass_s") + processor(level, "token_s") + processor(level, "launch_s")

    (faster,) = helps_by(overheads, HOST, Objective())
    assert (faster.change, faster.speedup) == ("a processor that computes twice as fast", 2.0)


def test_memory_that_was_allowed_is_doubled_with_the_memory():
    def cost(model, objective):
        return 1e9 / min(model.machine.level(RAM).capacity_bytes, objective.memory_limits.get(RAM, 1e12))

    (more,) = helps_by(cost, HOST, Objective(memory_limits={RAM: 10**8}))
    assert (more.change, more.speedup) == ("twice the memory", 2.0)


def test_the_best_comes_first_and_what_hardly_helps_or_does_not_fit_is_left_out():
    def cost(model, objective):
        here = model.machine.level(RAM)
        if here.capacity_bytes > 10**9:
            raise CapacityError("no")
        read, flops = here.read_bytes_per_s / 1e10, processor(here) / 1e11
        return 0.02 / read + 0.75 / flops + 0.2 / (model.machine.link(DISK, RAM).bytes_per_s(1.0) / 5e8) + 0.03

    found = [(it.change, it.speedup) for it in helps_by(cost, HOST, Objective())]
    assert found == [
        ("a processor that computes twice as fast", round(1 / 0.625, 3)),
        ("a disk that is read twice as fast", round(1 / 0.9, 3)),
    ]

    def never(model, objective):
        raise CapacityError("no")

    assert helps_by(never, HOST, Objective()) == ()


def test_smaller_formats_are_weighed():
    def cost(model, objective):
        return model.costs.formats.weight_bytes + model.costs.embedding_bytes * 1e-6

    table = 2 * 1000 * 512
    before = 2 + table * 2e-6
    expected = {
        "weights in int4 (--quantize int4)": before / (4.5 / 8 + table * 8.5 / 8 * 1e-6),
        "weights in int8 (--quantize int8)": before / (8.5 / 8 + table * 8.5 / 8 * 1e-6),
    }
    assert {it.change: it.speedup for it in helps_by(cost, HOST, Objective())} == pytest.approx(expected, abs=1e-3)
    costs = HOST.costs
    small = dataclasses.replace(costs, formats=dataclasses.replace(costs.formats, matrices="int8", embeddings="int8"))
    (only,) = helps_by(cost, dataclasses.replace(HOST, costs=small), Objective())
    assert only.change == "weights in int4 (--quantize int4)"


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"weights_on_device": 0.03}, (0.0, 0.9)),  # less than what all tokens need
        ({"weights_on_device": 0.95}, (0.9, 0.0)),  # the rest is on disk
    ],
)
def test_other_weights_take_the_device_before_experts(changes, places):
    found = dict(expert_places(DEVICE_MODEL, dataclasses.replace(POLICY, **changes)))
    assert found == pytest.approx({"device": places[0], "ram": places[1], "disk": 0.1}, abs=1e-6)


def test_experts_get_what_other_weights_leave():
    costs = DEVICE_MODEL.costs
    on_device = 0.6 * costs.layers_bytes - (costs.layers_bytes - costs.experts_bytes)
    found = dict(expert_places(DEVICE_MODEL, POLICY))
    assert found["device"] == pytest.approx(on_device / costs.experts_bytes, abs=1e-6)
    assert found["ram"] == pytest.approx(0.9 - found["device"], abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"attention_on_device": False}, "cgopipe"),
        ({}, "flexgen"),
        ({"kv_on_device": 1.0}, "zero-inference"),
        ({"kv_on_device": 1.0, "weights_on_device": 1.0, "experts_on_disk": 0.0}, "resident"),
    ],
)
def test_pipelines(changes, name):
    assert pipeline_of(DEVICE_MODEL, dataclasses.replace(POLICY, **changes)) == name


def test_a_host_streams_what_is_on_disk():
    assert pipeline_of(HOST, dataclasses.replace(POLICY, experts_on_disk=0.1)) == "disk-offload"
    assert pipeline_of(HOST, dataclasses.replace(POLICY, experts_on_disk=0.0)) == "resident"


def test_a_plan_holds_the_prediction():
    """An uncertainty of a quarter: from 1 / 1.25 of a figure to 1.25 of it; memory is known to a twentieth."""
    model, policy = HOST, dataclasses.replace(POLICY, micro_batch=6, experts_on_disk=0.0, ffn_on_device=False)
    prediction = model.predict(policy)
    found = SearchResult(
        policy=policy, prediction=prediction, pipeline="resident", uncertainty=0.25, bottleneck="it", helps=()
    )
    plan = describe(model, Objective(memory_limits={RAM: 2 * 10**8}), found, model_name="small", reasons=(("a", "b"),))
    figures = {
        "prefill_tokens_per_s": 6 * 100 / prediction.prefill_s,
        "decode_tokens_per_s": 6 / prediction.decode_s,
        "tokens_per_s": prediction.tokens_per_s,
        "time_per_token_s": prediction.decode_s,
    }
    for name, value in figures.items():
        estimate = getattr(plan, name)
        assert (estimate.low, estimate.value, estimate.high) == pytest.approx((value / 1.25, value, value * 1.25)), name
    assert plan.kv_cache_bytes == 6 * 160 * model.costs.kv_bytes  # 148 tokens, in blocks of 16
    (ram,) = plan.memory
    used = prediction.memory["ram"]
    assert (ram.tier, ram.capacity_bytes, plan.memory_bytes) == ("ram", 2 * 10**8, 2 * 10**8)
    assert (ram.peak_bytes.value, ram.peak_bytes.high) == pytest.approx((used, used * 1.05))
    tight = describe(model, Objective(memory_limits={RAM: int(used * 1.01)}), found, model_name="small", reasons=())
    assert tight.memory[0].peak_bytes.high == int(used * 1.01)  # it will be kept to
    assert dict(plan.busy) == {"host": 1.0, "disk": 0.0}


def test_pinned_memory_grows_with_the_memory_that_it_is_part_of():
    where = DEVICE_MODEL.machine
    pinned = dataclasses.replace(where.level(RAM), name="pinned", capacity_bytes=10**6, processor=None)
    model = dataclasses.replace(DEVICE_MODEL, machine=dataclasses.replace(where, levels=(*where.levels, pinned)))

    def cost(model, objective):
        return 1 / model.machine.level("pinned").capacity_bytes

    assert [(it.change, it.speedup) for it in helps_by(cost, model, Objective())] == [("twice the memory", 2.0)]
