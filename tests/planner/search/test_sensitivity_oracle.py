"""What more of each resource would bring, with costs that depend on one resource alone."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, DISK, RAM
from moeflow.planner.search.objective import Objective
from moeflow.planner.search.sensitivity import helps_by
from tests.planner.examples import machine, small_model

HOST = small_model(machine(ram=10**9))
DEVICE_MODEL = small_model(machine(ram=10**9, device=10**9))


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


def test_pinned_memory_grows_with_the_memory_that_it_is_part_of():
    where = DEVICE_MODEL.machine
    pinned = dataclasses.replace(where.level(RAM), name="pinned", capacity_bytes=10**6, processor=None)
    model = dataclasses.replace(DEVICE_MODEL, machine=dataclasses.replace(where, levels=(*where.levels, pinned)))

    def cost(model, objective):
        return 1 / model.machine.level("pinned").capacity_bytes

    assert [(it.change, it.speedup) for it in helps_by(cost, model, Objective())] == [("twice the memory", 2.0)]
