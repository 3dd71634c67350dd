from __future__ import annotations

import pytest

from moeflow.bench.plan_plots import panels_and_notes
from moeflow.core.plan import Policy
from moeflow.planner.figures.policy_map import MapPoint, PolicyMap, num_map_points, policy_map, scaled_link_and_host
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.search.objective import Objective
from tests.planner.examples import machine, small_model


def a_map(*weights):
    points = [MapPoint(x, 1.0, None if it is None else policy_with(it), 1.0) for x, it in enumerate(weights)]
    return PolicyMap("title", "x", "y", tuple(points), has_device=True)


def policy_with(weights):
    return Policy(batch_size=8, micro_batch=8, attention_on_device=False, ffn_on_device=True, weights_on_device=weights)


PANELS = [
    ("weights on the device, %", lambda policy: 100 * policy.weights_on_device),
    ("sequences at once", lambda policy: policy.batch_size),
]


def test_what_is_the_same_everywhere_is_said_instead_of_drawn():
    drawn, notes = panels_and_notes(a_map(0.2, None, 0.4), PANELS)
    assert [label for label, _ in drawn] == ["weights on the device, %"]
    assert notes == ["sequences at once: 8 everywhere"]
    drawn, notes = panels_and_notes(a_map(1.0, 1.0), PANELS)
    assert drawn == []
    assert notes[0] == "weights on the device: 100% everywhere"


def test_link_and_host_are_scaled_and_nothing_else():
    before = load_machine("l4")
    after = scaled_link_and_host(before, 4.0, 2.0)
    ram, ram_before = after.level("ram"), before.level("ram")
    assert ram.capacity_bytes == 2 * ram_before.capacity_bytes
    assert ram.read_bytes_per_s == 2 * ram_before.read_bytes_per_s
    assert ram.processor.peak("float32") == 2 * ram_before.processor.peak("float32")
    assert after.level("device") == before.level("device")
    for source, target, factor in (("ram", "device", 4), ("pinned", "device", 4), ("disk", "ram", 1)):
        assert after.link(source, target).peak_bytes_per_s == factor * before.link(source, target).peak_bytes_per_s


@pytest.mark.slow
def test_a_host_with_more_memory_and_a_faster_disk_is_no_slower():
    done: list[int] = []
    model = small_model(machine(ram=10**9))
    made = policy_map(model, Objective(max_sequences=16), on_point=lambda: done.append(1))
    assert len(done) == len(made.points) == num_map_points(model)
    known = {(point.x, point.y): point for point in made.points}
    for (x, y), point in known.items():
        more = [it.tokens_per_s for (x_, y_), it in known.items() if x_ >= x and y_ >= y]
        assert point.tokens_per_s <= min(more) * 1.01
