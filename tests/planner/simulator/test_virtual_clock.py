"""The virtual clock: tasks wait for inputs and lanes, no lane idles without need, and durations add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.pipeline.catalog import PIPELINES
from moeflow.pipeline.task import COMPUTE, Task, TaskMaker
from moeflow.planner.costs.task_costs import TaskCost
from moeflow.planner.simulator.virtual_clock import run_virtually


def timed(tasks, seconds_of, window=256):
    return run_virtually(tasks, lambda task: TaskCost(0, 0, seconds_of(task)), window=window)


def check(run, seconds_of) -> None:
    """Check that each task runs once, for its time, after its inputs and while its lane runs no other task."""
    ends = {one.task.id: one.end_s for one in run}
    assert sorted(ends) == list(range(len(run)))
    free = {}
    for one in sorted(run, key=lambda one: (one.start_s, one.end_s)):
        assert one.end_s == one.start_s + seconds_of(one.task)
        assert one.start_s >= max([free.get(one.task.lane, 0), *(ends[before] for before in one.task.after)])
        free[one.task.lane] = one.end_s


@st.composite
def graphs(draw, max_size):
    tasks = []
    for number in range(draw(st.integers(0, max_size))):
        after = draw(st.sets(st.integers(max(0, number - 9), number - 1), max_size=3)) if number else ()
        lane = draw(st.sampled_from((COMPUTE, "link", "disk")))
        tasks.append(Task(number, "do", None, None, lane, tuple(after), draw(st.integers(0, 1))))
    return tasks


@given(graphs(30), st.lists(st.integers(0, 5), min_size=30, max_size=30), st.sampled_from([1, 2, 7, 256]))
@settings(max_examples=20)
def test_tasks_run_after_their_inputs_one_at_a_time_per_lane(tasks, seconds, window):
    check(timed(tasks, lambda task: seconds[task.id], window), lambda task: seconds[task.id])


@given(graphs(7), st.lists(st.integers(1, 5), min_size=7, max_size=7))
@settings(max_examples=40)
def test_no_lane_idles_while_one_of_its_tasks_could_run(tasks, seconds):
    """As many tasks as the caller reads at once: each starts when its last input or another task of its lane ends."""
    run = timed(tasks, lambda task: seconds[task.id])
    ends = {one.task.id: one.end_s for one in run}
    for one in run:
        lane_ends = {other.end_s for other in run if other.task.lane == one.task.lane}
        assert one.start_s == max([0, *(ends[before] for before in one.task.after)]) or one.start_s in lane_ends


@pytest.mark.parametrize("name", sorted(PIPELINES))
@given(st.integers(1, 3), st.integers(1, 4), st.data())
@settings(max_examples=15)
def test_pipelines_run_by_the_same_rules(name, num_layers, num_micro_batches, data):
    tasks = list(PIPELINES[name].make_tasks(num_layers, num_micro_batches, wraps=True))
    seconds = {op: data.draw(st.integers(0, 9)) for op in sorted({task.op for task in tasks})}
    check(timed(tasks, lambda task: seconds[task.op]), lambda task: seconds[task.op])


def test_what_a_task_frees_begins_in_the_order_of_the_stream():
    make = TaskMaker()
    first = make("do")
    tasks = [first, *(make("do", lane="link", after=[first]) for _ in range(3))]
    run = timed(tasks, lambda _: 1)
    assert [(one.task.id, one.start_s) for one in run] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_demand_goes_before_prefetches():
    make = TaskMaker()
    tasks = [make("do", lane="disk", priority=1 if number in (1, 2) else 0) for number in range(5)]
    run = timed(tasks, lambda _: 1)
    assert [(one.task.id, one.start_s) for one in run] == [(0, 0), (3, 1), (4, 2), (1, 3), (2, 4)]


def test_a_small_window_keeps_later_tasks_waiting():
    make = TaskMaker()
    tasks = [make("do", lane="link"), make("do", lane="link"), make("do")]
    run = timed(tasks, lambda _: 2, 2)
    assert [(one.task.id, one.start_s) for one in run] == [(0, 0), (1, 2), (2, 2)]


def test_nothing_takes_no_time_and_a_wrong_stream_is_refused():
    assert run_virtually([], lambda _: TaskCost(0, 0, 1)) == []
    with pytest.raises(ValueError, match="do not come before"):
        run_virtually([Task(0, "do", None, None, COMPUTE, (0,))], lambda _: TaskCost(0, 0, 1))
