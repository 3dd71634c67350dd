"""Waiting tasks that a lane runs as one."""

from __future__ import annotations

import pytest

from moeflow.pipeline.task import TaskMaker
from moeflow.planner.costs.task_costs import TaskCost
from studies.asynchronous.joining_clock import run_joining


def test_a_lane_does_what_waits_and_joins_as_one():
    """While task 0 keeps the lane, 1 to 4 come to wait. Tasks 2 and 4 join 1, the first; each has a part of the
    time."""
    make = TaskMaker()
    ops = ["first", "even", "even", "odd", "even"]
    tasks = [make(op, lane="other") for op in ops]
    run = run_joining(
        tasks,
        lambda joined: TaskCost(6.0 * len(joined), 0, 1.0 + 0.5 * (len(joined) - 1)),
        lambda one, other: one.op == other.op,
    )
    assert [one.task.id for one in run] == [0, 1, 2, 4, 3]
    assert [one.end_s for one in run] == pytest.approx([1, 1 + 2 / 3, 1 + 4 / 3, 3, 4])
    assert [one.start_s for one in run] == pytest.approx([0, *(one.end_s for one in run[:-1])])
    assert [one.cost.num_bytes for one in run] == [6] * 5
