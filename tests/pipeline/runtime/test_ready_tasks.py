"""How far a stream is read ahead, and the queue of a lane against a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from moeflow.pipeline.runtime.ready_tasks import ReadyTasks
from moeflow.pipeline.runtime.urgent_first import UrgentFirst
from moeflow.pipeline.task import COMPUTE, Task


class OneLane(ReadyTasks):
    """Runs the caller's tasks at once; those of the other lane end, in a given order, when the caller waits."""

    def __init__(self, tasks, window, picks=()) -> None:
        self.queue, self.picks, self.read, self.ran, self.num_unfinished = [], list(picks), [], [], []
        super().__init__((self.read.append(task.id) or task for task in tasks), window)

    def run_here(self, entry):
        self.end(entry)

    def submit(self, entry):
        self.queue.append(entry)

    def wait(self):
        while self.must_wait:
            self.end(self.queue.pop((self.picks.pop() if self.picks else 0) % len(self.queue)))

    def end(self, entry):
        self.num_unfinished.append(len(self.unfinished))
        self.ran.append(entry.task.id)
        self.finish(entry)


def stream(lanes):
    return [Task(number, "op", 0, 0, lane) for number, lane in enumerate(lanes)]


@given(st.lists(st.sampled_from((COMPUTE, "link")), max_size=60), st.integers(1, 40), st.lists(st.integers(0, 9)))
@settings(max_examples=60)
def test_all_tasks_run_and_no_more_of_them_are_unfinished_than_the_window_has(lanes, window, picks):
    run = OneLane(stream(lanes), window, picks)
    run.run_all()
    assert sorted(run.ran) == run.read == list(range(len(lanes)))
    assert max(run.num_unfinished, default=0) <= window
    assert not run.unfinished


def test_the_first_task_does_not_wait_for_a_whole_window():
    run = OneLane(stream([COMPUTE] * 200), 100)
    run.run_all()
    assert 1 <= run.num_unfinished[0] <= 10


def test_a_failed_task_stops_the_run_and_no_other_starts():
    """Task 1 waits for the failed one; task 3 waits for one that finishes later in its lane."""
    lanes = stream([COMPUTE, COMPUTE, "link", "link"])
    run = OneLane(
        [task if number % 2 == 0 else replace(task, after=(number - 1,)) for number, task in enumerate(lanes)], 9
    )
    run.run_here = run.fail
    run.run_all()
    (loading,) = run.queue
    run.finish(loading)
    assert run.queue == [loading]
    assert list(run.unfinished) == [1, 3]


def test_an_invalid_stream_is_refused_when_it_is_read():
    with pytest.raises(ValueError, match="comes where task 0 should"):
        OneLane([Task(1, "op", 0, 0, COMPUTE)], 4).run_all()


@given(st.lists(st.integers(0, 3) | st.none(), max_size=60))
def test_a_lanes_queue_is_sorted_by_priority_and_then_by_arrival(puts):
    """A number puts an item of that priority, None takes one."""
    queue, model = UrgentFirst(), []
    for number, priority in enumerate(puts):
        if priority is None:
            assert queue.take() == (model.pop(0) if model else None)
        else:
            queue.put((priority, number), priority)
            model = sorted([*model, (priority, number)])
    assert sorted(queue) == model
    assert [queue.take() for _ in range(len(model) + 1)] == [*model, None]
