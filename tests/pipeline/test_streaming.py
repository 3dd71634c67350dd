from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.priority import PREFETCH
from moeflow.pipeline.streaming import DISK, few_experts, nearly_all_experts, streaming
from moeflow.pipeline.task import COMPUTE, TaskMaker, checked

OPS = ["pre_attention", "attention", "route", "experts_in_memory", "experts_that_arrived"]


@given(st.lists(st.booleans(), max_size=6))
def test_layers_compute_in_order_and_reads_depend_on_routers_only(has_experts):
    tasks = list(checked(few_experts(has_experts, TaskMaker())))
    by_id = {task.id: task for task in tasks}
    expected = [
        (layer, op)
        for layer, is_routed in enumerate(has_experts)
        for op in (OPS if is_routed else [*OPS[:2], "post_attention"])
    ]
    assert [(task.layer, task.op) for task in tasks if task.lane == COMPUTE] == expected
    for task in tasks:
        if task.lane == DISK:
            assert [by_id[before].op for before in task.after] == ["route"]
            assert (task.priority == PREFETCH) == (task.op == "prefetch")
    awaited = {before for task in tasks for before in task.after}
    assert all((task.id in awaited) == (task.op == "load_experts") for task in tasks if task.lane == DISK)


@given(st.lists(st.booleans(), max_size=6))
def test_with_nearly_all_experts_the_disk_goes_from_layer_to_layer(has_experts):
    tasks = list(checked(nearly_all_experts(has_experts, TaskMaker())))
    by_id = {task.id: task for task in tasks}
    routed = [layer for layer, is_routed in enumerate(has_experts) if is_routed]
    reads = [(task.op, task.layer) for task in tasks if task.lane == DISK]
    expected = [("load_other_experts", layer) for layer in routed[:1]]
    for layer in routed[1:]:
        expected += [("read_ahead", layer), ("load_other_experts", layer)]
    assert reads == expected
    for task in tasks:
        before = {(by_id[number].op, by_id[number].layer) for number in task.after}
        if task.op == "read_ahead":
            assert before == {("load_other_experts", max(layer for layer in routed if layer < task.layer))}
        if task.op == "load_other_experts":
            assert before >= {("route", task.layer)}
            assert (("read_ahead", task.layer) in before) == (task.layer != routed[0])


def test_both_kinds_of_pass_are_one_stream():
    ops = {task.op for task in checked(streaming([True, False, True]))}
    assert {"prefetch", "read_ahead"} < ops
