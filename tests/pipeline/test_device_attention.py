"""Attention that moves to the device: the same stages in the same order, and two windows of keys and values."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moeflow.pipeline.catalog import PIPELINES
from moeflow.pipeline.cgopipe_sharing import cgopipe_sharing
from moeflow.pipeline.device_attention import attending_on_device
from moeflow.pipeline.offloading import OP_LANES
from moeflow.pipeline.task import COMPUTE, checked

MAKERS = {name: each.make_tasks for name, each in PIPELINES.items() if each.attends_on_host} | {
    "sharing": cgopipe_sharing
}
HOST = ["pre_attention", "offload_qkv", "cpu_attention", "load_hidden"]
WINDOW = ["pre_attention", "kv_to_pinned", "load_kv", "device_attention"]
STORE = ["pre_attention", "store_kv", "save_kv"]
RESIDENT = ["pre_attention", "device_attention"]


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(0, 4), st.lists(st.booleans(), min_size=1, max_size=5))
@example(2, 0, [True] * 4)
def test_each_stage_comes_once_and_where_it_should(name, num_layers, num_resident, on_device):
    plain = list(MAKERS[name](num_layers, len(on_device), is_warm=True, wraps=True))
    moved = attending_on_device(plain, lambda layer: layer < num_resident, on_device.__getitem__)
    tasks = list(checked(moved))
    before = []
    for task in tasks:
        before.append(set(task.after).union(*(before[number] for number in task.after)))
        assert OP_LANES.get(task.op, COMPUTE) == task.lane
    last_op = "route" if name == "sharing" else "post_attention"
    for layer, micro_batch in itertools.product(range(num_layers), range(len(on_device))):
        place = (layer, micro_batch)
        here = {task.op: task for task in tasks if (task.layer, task.micro_batch) == place}
        chain = RESIDENT if layer < num_resident else WINDOW if on_device[micro_batch] else HOST
        found = set(here) & {*HOST, *WINDOW, *STORE}
        assert found == {*chain, *(STORE if chain == WINDOW else [])}
        assert all(one in before[two] for one, two in itertools.pairwise([here[op].id for op in [*chain, last_op]]))
        if chain == WINDOW:
            assert all(one in before[two] for one, two in itertools.pairwise([here[op].id for op in STORE]))
            assert here["store_kv"].id not in before[here[last_op].id]
    ops = ("kv_to_pinned", "load_kv", "device_attention")
    gathered, loads, uses = ([task.id for task in tasks if task.op == op] for op in ops)
    uses = [number for number in uses if tasks[number].layer >= num_resident]
    assert all(one in before[two] for one, two in itertools.pairwise(loads))
    assert all(use in before[load] for use, load in zip(uses, loads[2:], strict=False))
    assert all(load in before[one] for load, one in zip(loads, gathered[2:], strict=False))


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_changes_where_the_host_attends(name):
    plain = list(MAKERS[name](3, 2, is_warm=False, wraps=True))
    assert list(attending_on_device(plain, lambda _: False, lambda _: False)) == plain
