"""Idle time and memory of runs on the virtual clock: by hand, and what every pipeline keeps to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.pipeline.catalog import PIPELINES
from moeflow.pipeline.runtime.perfetto import perfetto_events
from moeflow.pipeline.task import COMPUTE, TaskMaker
from moeflow.planner.costs.task_costs import TaskCost
from moeflow.planner.simulator.time_line import TimeLine, add_steps, kv_buffer, peak, weight_buffer
from moeflow.planner.simulator.virtual_clock import run_virtually

LAYER_BYTES = 12.0
KV_BYTES = 5.0


def line_of(tasks, costs):
    return TimeLine(run_virtually(tasks, costs))


def test_a_lane_is_idle_when_it_does_nothing():
    make = TaskMaker()
    load = make("load", 0, lane="link")
    tasks = [load, make("compute", 0, 0, after=[load])]
    tasks += [make("load", 1, lane="link", after=[tasks[1]]), make("compute", 0, 1)]
    costs = {"load": TaskCost(30, 0, 2.0), "compute": TaskCost(0, 7, 3.0)}
    line = line_of(tasks, lambda task: costs[task.op])
    # Task 3 waits for nothing, so it goes first: 3 at 0-3, 0 at 0-2, 1 at 3-6, 2 at 6-8.
    assert line.seconds == 8
    assert line.idle(COMPUTE) == [(6, 8)]
    assert line.idle("link") == [(2, 6)]
    use = line.use("link")
    assert (use.busy_s, use.idle_share, use.num_bytes, use.num_flops) == (4, 0.5, 60, 0)
    assert line.use(COMPUTE).num_flops == 14
    assert line.use("nobody").idle_share == 1
    assert line.idle("nobody") == [(0, 8)]
    assert list(line.lanes) == [COMPUTE, "link"]


def test_the_trace_has_work_and_waits_of_each_lane():
    make = TaskMaker()
    load = make("load", 0, lane="link")
    tasks = [load, make("compute", 0, 1, after=[load])]
    trace = line_of(tasks, lambda task: TaskCost(10, 0, 1e-3)).to_trace()
    slices = [event for event in perfetto_events(trace) if event["ph"] == "X"]
    assert [(event["name"], event["cat"], event["ts"], event["dur"]) for event in slices] == [
        ("idle", "blocked", 0, 1000),
        ("compute 0.1", "work", 1000, 1000),
        ("load 0", "work", 0, 1000),
        ("idle", "blocked", 1000, 1000),
    ]
    assert sum(event["ph"] == "s" for event in perfetto_events(trace)) == 1


def test_nothing_has_no_length():
    line = TimeLine([])
    assert (line.seconds, line.use(COMPUTE).idle_share, line.idle(COMPUTE)) == (0, 0, [])
    assert weight_buffer(line) == kv_buffer(line) == [(0, 0)]


def test_pages_take_their_place_and_layers_give_it_up():
    tasks = PIPELINES["cgopipe"].make_tasks(2, 2)
    seconds = {"weights_to_device": 1.0, "post_attention": 4.0}
    steps = weight_buffer(line_of(tasks, lambda task: TaskCost(6, 0, seconds.get(task.op, 0.0))))
    # In pages of 6, layer 0 comes at 0 and 1, and layer 1 at 2 and 3. They are done at 10 and 18.
    assert steps == [(0, 0), (0, 6), (1, 12), (2, 18), (3, 24), (10, 12), (18, 0)]


@pytest.mark.parametrize("name", sorted(PIPELINES))
@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
@settings(max_examples=15)
def test_no_pipeline_takes_more_than_two_layers_and_two_micro_batches(
    name, num_layers, num_micro_batches, is_warm, data
):
    pages = num_micro_batches if PIPELINES[name].is_paged else 1
    sizes = {"weights_to_device": LAYER_BYTES / pages, "load_kv": KV_BYTES}
    tasks = list(PIPELINES[name].make_tasks(num_layers, num_micro_batches, is_warm=is_warm))
    seconds = {op: data.draw(st.floats(0.01, 9)) for op in sorted({task.op for task in tasks})}
    line = line_of(tasks, lambda task: TaskCost(sizes.get(task.op, 0), 0, seconds[task.op]))
    weights, kv = weight_buffer(line, is_warm=is_warm), kv_buffer(line)
    assert peak(weights) <= 2 * LAYER_BYTES + 1e-9
    assert peak(kv) <= 2 * KV_BYTES
    assert peak(kv) == 0 or name == "flexgen"
    if num_layers > 1 or not is_warm:
        assert weights[-1][1] == pytest.approx(0)
        assert min(num_bytes for _, num_bytes in weights) >= -1e-9
    assert kv[-1][1] == 0


def test_steps_add_up():
    assert add_steps([(0, 1), (2, 5), (3, 0)], [(0, 0), (2, 1), (4, 0)]) == [(0, 1), (2, 6), (3, 1), (4, 0)]
