import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.pipeline.runtime.window import Window
from moeflow.pipeline.task import COMPUTE, Task


def stream(num_tasks):
    return (Task(number, "op", 0, 0, COMPUTE) for number in range(num_tasks))


@given(num_tasks=st.integers(0, 60), size=st.integers(1, 40), done=st.lists(st.integers(0, 12), max_size=60))
def test_tasks_come_in_order_and_no_more_of_them_than_there_is_room_for(num_tasks, size, done):
    window, unfinished, read = Window(stream(num_tasks), size), 0, []
    for num_done in [*done, *[1] * num_tasks, 0]:
        unfinished = max(0, unfinished - num_done)
        could = window.has_room(unfinished)
        tasks = window.read(unfinished)
        assert could or not tasks
        assert not could or tasks or window.is_at_end
        unfinished += len(tasks)
        read += [task.id for task in tasks]
        assert unfinished <= size
    assert read == list(range(len(read)))
    assert not window.is_at_end or len(read) == num_tasks
    while window.read(0):
        pass
    assert window.is_at_end
    assert not window.has_room(0)


def test_the_first_task_does_not_wait_for_a_whole_window():
    made = []
    window = Window((made.append(task.id) or task for task in stream(200)), 100)
    assert 1 <= len(window.read(0)) == len(made) <= 10


def test_a_stream_that_is_none_is_found_when_it_is_read():
    window = Window([Task(1, "op", 0, 0, COMPUTE)], 4)
    with pytest.raises(ValueError, match="comes where task 0 should"):
        window.read(0)
