"""Streams of batches in flight: what waits for what, worked out by hand and by a search for paths."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from moeflow.pipeline.task import checked
from studies.asynchronous.expert_parallel import (
    ATTEND,
    BARRIER,
    COMBINE,
    DISPATCH,
    EXPERTS,
    Batches,
    asynchronous,
    rounds,
    synchronous,
)

REACHED = {(0, 0): [0, 1], (0, 1): [1], (0, 2): [0], (1, 0): [0], (1, 1): [0, 1], (1, 2): [1]}
AT = Batches(2, 2, [0, 1, 0], lambda layer, batch: REACHED[layer, batch])


def ancestors(tasks):
    """All tasks that have to end before each."""
    found = []
    for task in tasks:
        found.append(set(task.after).union(*(found[before] for before in task.after)))
    return found


def test_without_barriers_batches_know_nothing_of_each_other():
    tasks = list(checked(asynchronous(AT)))
    for task, before in zip(tasks, ancestors(tasks), strict=True):
        assert all(tasks[other].micro_batch == task.micro_batch for other in before)
    assert Counter((task.op, task.lane) for task in tasks if task.micro_batch == 0 and task.layer == 0) == {
        (ATTEND, "device 0"): 1,
        (DISPATCH, "link of device 0"): 1,
        (EXPERTS, "device 0"): 1,
        (EXPERTS, "device 1"): 1,
        (COMBINE, "link of device 1"): 1,
    }


def test_a_batch_goes_on_when_all_its_results_are_back():
    tasks = list(asynchronous(AT))
    (second,) = [task for task in tasks if (task.op, task.layer, task.micro_batch) == (ATTEND, 1, 0)]
    assert [(tasks[i].op, tasks[i].lane) for i in second.after] == [
        (EXPERTS, "device 0"),
        (COMBINE, "link of device 1"),
    ]
    remote = next(task for task in tasks if task.op == EXPERTS and task.lane == "device 1")
    own = next(task for task in tasks if task.op == EXPERTS and task.lane == "device 0")
    assert [tasks[i].op for i in remote.after] == [DISPATCH]
    assert [tasks[i].op for i in own.after] == [ATTEND]


def test_with_barriers_every_section_waits_for_all_before_it():
    assert rounds(AT) == [(0, 1), (2,)]
    tasks = list(checked(synchronous(AT)))
    sections, current = [], []
    for task in tasks:
        current.append(task)
        if task.op == BARRIER:
            sections.append(current)
            current = []
    assert not current
    assert [section[0].op for section in sections] == [ATTEND, DISPATCH, EXPERTS, COMBINE] * 4
    before = ancestors(tasks)
    for earlier, later in itertools.pairwise(sections):
        assert all({task.id for task in earlier} <= before[task.id] for task in later)
    lanes = [sorted(task.lane for task in section if task.op == EXPERTS) for section in sections]
    assert [each for each in lanes if each] == [
        ["device 0", "device 1"],
        ["device 0"],
        ["device 0", "device 1"],
        ["device 1"],
    ]


@pytest.mark.parametrize("schedule", [synchronous, asynchronous])
def test_no_devices_work_is_lost(schedule):
    done = {(task.layer, task.lane) for task in schedule(AT) if task.op == EXPERTS}
    assert done == {(layer, f"device {d}") for (layer, _), devices in REACHED.items() for d in devices}
