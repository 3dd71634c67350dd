from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.priority import PREFETCH
from moeflow.pipeline.streaming import DISK, streaming
from moeflow.pipeline.task import COMPUTE, checked

OPS = ["pre_attention", "attention", "route", "experts_in_memory", "experts_that_arrived"]


@given(st.lists(st.booleans(), max_size=6))
def test_layers_compute_in_order_and_reads_depend_on_routers_only(has_experts):
    tasks = list(checked(streaming(has_experts)))
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
