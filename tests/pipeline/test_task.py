"""Streams are checked; the makers number as the stream goes."""

from __future__ import annotations

import pytest

from moeflow.pipeline.task import COMPUTE, Task, TaskMaker, checked


def test_the_maker_numbers_and_leaves_out_what_does_not_exist_yet():
    make = TaskMaker()
    first = make("load", 0, lane="link", after=[None])
    second = make("compute", 0, 1, after=[first, None], priority=2)
    assert first == Task(0, "load", 0, None, "link")
    assert second == Task(1, "compute", 0, 1, COMPUTE, after=(0,), priority=2)
    with pytest.raises(AttributeError, match="immutable"):
        first.op = "other"


def test_a_right_stream_passes_unchanged():
    make = TaskMaker()
    first = make("a")
    tasks = [first, make("b"), make("c", after=[first])]
    assert list(checked(tasks)) == tasks


@pytest.mark.parametrize(
    ("number", "after", "complaint"),
    [
        (0, (), "task 0 .* where task 1 should"),
        (2, (), "task 2 .* where task 1 should"),
        (1, (1,), "do not come before"),
        (1, (0, 5), "do not come before"),
        (1, (-1,), "do not come before"),
    ],
)
def test_doubled_missing_and_later_tasks_are_found(number, after, complaint):
    with pytest.raises(ValueError, match=complaint):
        list(checked([Task(0, "a", None, None, COMPUTE), Task(number, "b", None, None, COMPUTE, after)]))
