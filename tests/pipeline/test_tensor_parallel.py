"""Pipelines of several devices: the same stages, with sums that all devices make in the same order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.pipeline.catalog import OFFLOADING
from moeflow.pipeline.device_attention import attending_on_device
from moeflow.pipeline.offloading import BETWEEN_DEVICES
from moeflow.pipeline.task import COMPUTE, checked
from moeflow.pipeline.tensor_parallel import sharing_layers

STEPS = ["project_part", "sum_attention", "network_part", "sum_network", "add_network"]


@pytest.mark.parametrize("name", OFFLOADING)
@settings(max_examples=25)
@given(st.integers(1, 4), st.lists(st.booleans(), min_size=1, max_size=5))
def test_layers_are_cut_and_nothing_is_used_before_it_is_there(name, num_layers, on_device):
    plain = OFFLOADING[name].make_tasks(num_layers, len(on_device), is_warm=True, wraps=True)
    if OFFLOADING[name].attends_on_host and name != "sequential":
        plain = attending_on_device(plain, lambda _: False, on_device.__getitem__)
    plain = list(plain)
    tasks = list(checked(sharing_layers(plain)))
    before: list[set[int]] = []
    for task in tasks:
        before.append(set(task.after).union(*(before[number] for number in task.after)))

    kept = [(task.op, task.layer, task.micro_batch) for task in tasks if task.op not in STEPS]
    assert kept == [(task.op, task.layer, task.micro_batch) for task in plain if task.op != "post_attention"]
    ended: dict[int, int] = {}
    for layer, micro_batch in itertools.product(range(num_layers), range(len(on_device))):
        here = {task.op: task for task in tasks if (task.layer, task.micro_batch) == (layer, micro_batch)}
        assert [task.op for task in here.values() if task.op in STEPS] == STEPS
        assert all(one in before[two] for one, two in itertools.pairwise([here[op].id for op in STEPS]))
        if micro_batch in ended:
            assert ended[micro_batch] in before[here["pre_attention"].id]
        ended[micro_batch] = here["add_network"].id
    sums = [task for task in tasks if task.op.startswith("sum_")]
    assert all(task.lane == BETWEEN_DEVICES for task in sums)
    assert all(one.id in before[two.id] for one, two in itertools.pairwise(sums))


def test_a_micro_batch_computes_while_another_one_is_added_up():
    tasks = list(sharing_layers(OFFLOADING["cgopipe"].make_tasks(2, 3, is_warm=True, wraps=True)))
    before: list[set[int]] = []
    for task in tasks:
        before.append(set(task.after).union(*(before[number] for number in task.after)))
    first = next(task for task in tasks if task.op == "sum_network" and task.micro_batch == 0)
    second = next(task for task in tasks if task.op == "project_part" and task.micro_batch == 1)
    assert second.lane == COMPUTE
    assert first.id not in before[second.id]
