"""The plain twin: everything once, in the order of the layers, one thing after another."""

from __future__ import annotations

import pytest

from moeflow.pipeline.sequential import sequential
from moeflow.pipeline.task import checked


@pytest.mark.parametrize(("num_layers", "num_micro_batches"), [(0, 1), (1, 1), (2, 3), (4, 0)])
def test_each_task_comes_after_the_one_before_it(num_layers, num_micro_batches):
    tasks = list(checked(sequential(num_layers, num_micro_batches)))
    assert len(tasks) == num_layers * (1 + 3 * num_micro_batches)
    assert [task.after for task in tasks] == [() if i == 0 else (i - 1,) for i in range(len(tasks))]


def test_two_layers_with_two_micro_batches():
    stages = ["pre_attention", "attention", "post_attention"]
    layer = [("load_weights", None), *((stage, 0) for stage in stages), *((stage, 1) for stage in stages)]
    expected = [(op, number, micro_batch) for number in range(2) for op, micro_batch in layer]
    assert [(task.op, task.layer, task.micro_batch) for task in sequential(2, 2)] == expected
