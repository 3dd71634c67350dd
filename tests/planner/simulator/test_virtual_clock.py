"""The virtual clock against the real executor, whose lanes and waits are made to live on a clock of the test's own."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.pipeline.catalog import PIPELINES
from moeflow.pipeline.runtime import executor
from moeflow.pipeline.runtime.future import Future
from moeflow.pipeline.task import COMPUTE, Task, TaskMaker
from moeflow.planner.costs.task_costs import TaskCost
from moeflow.planner.simulator.virtual_clock import run_joining, run_virtually


class Clock:
    """What lanes do, by when it ends; and what the caller does."""

    def __init__(self, seconds_of) -> None:
        self.seconds_of = seconds_of
        self.now = 0
        self.running = []
        self.numbers = count()
        self.log = []

    def do(self, task):
        if task.lane != COMPUTE:
            return  # its lane has taken the time
        start, end = self.now, self.now + self.seconds_of(task)
        while self.running and self.running[0][0] <= end:
            self.end_next()
        self.now = end
        self.log.append((task.id, start, end))

    def end_next(self):
        self.now, _, lane, job = heappop(self.running)
        lane.end(*job)

    def get(self):  # of the bell that the executor waits at
        self.end_next()

    def put(self, _):
        pass


class VirtualLane:
    """Takes the place of `runtime.lane.Lane`."""

    def __init__(self, clock) -> None:
        self.clock, self.is_free, self.queue = clock, True, []

    def submit(self, work, entry, *, priority, label):
        future = Future()
        heappush(self.queue, (priority, next(self.clock.numbers), (work, entry, future)))
        self.begin()
        return future

    def begin(self):
        if self.queue and self.is_free:
            self.is_free = False
            job = heappop(self.queue)[2]
            end = self.clock.now + self.clock.seconds_of(job[1].task)
            heappush(self.clock.running, (end, next(self.clock.numbers), self, (*job, self.clock.now)))

    def end(self, work, entry, future, start):
        self.clock.log.append((entry.task.id, start, self.clock.now))
        assert future.begin()
        future.set_result(work(entry))
        self.is_free = True
        self.begin()


def run_for_real(tasks, seconds_of, window):
    clock = Clock(seconds_of)
    lanes = {name: VirtualLane(clock) for name in {task.lane for task in tasks} - {COMPUTE}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "SimpleQueue", lambda: clock)
        ops = dict.fromkeys({task.op for task in tasks}, clock.do)
        executor.Executor(ops, lanes, window=window).run(tasks)
    return clock.log


def agree(tasks, seconds_of, window=256):
    timed = run_virtually(tasks, lambda task: TaskCost(0, 0, seconds_of(task)), window=window)
    assert [(one.task.id, one.start_s, one.end_s) for one in timed] == run_for_real(tasks, seconds_of, window)
    return timed


@st.composite
def graphs(draw):
    tasks = []
    for number in range(draw(st.integers(0, 30))):
        after = draw(st.sets(st.integers(max(0, number - 9), number - 1), max_size=3)) if number else ()
        lane = draw(st.sampled_from((COMPUTE, "link", "disk")))
        tasks.append(Task(number, "do", None, None, lane, tuple(after), draw(st.integers(0, 1))))
    return tasks


@given(graphs(), st.lists(st.integers(0, 5), min_size=30, max_size=30), st.sampled_from([1, 2, 7, 256]))
@settings(max_examples=20)
def test_random_graphs_run_as_the_executor_runs_them(tasks, seconds, window):
    agree(tasks, lambda task: seconds[task.id], window)


@pytest.mark.parametrize("name", sorted(PIPELINES))
@given(st.integers(1, 3), st.integers(1, 4), st.data())
@settings(max_examples=15)
def test_pipelines_run_as_the_executor_runs_them(name, num_layers, num_micro_batches, data):
    tasks = list(PIPELINES[name].make_tasks(num_layers, num_micro_batches, wraps=True))
    seconds = {op: data.draw(st.integers(0, 9)) for op in sorted({task.op for task in tasks})}
    timed = agree(tasks, lambda task: seconds[task.op])
    ends = {one.task.id: one.end_s for one in timed}
    busy = {}
    for one in sorted(timed, key=lambda one: (one.start_s, one.end_s)):
        assert all(ends[before] <= one.start_s for before in one.task.after)
        assert busy.get(one.task.lane, 0) <= one.start_s
        busy[one.task.lane] = one.end_s


def test_what_a_task_frees_begins_in_the_order_of_the_stream():
    make = TaskMaker()
    first = make("do")
    tasks = [first, *(make("do", lane="link", after=[first]) for _ in range(3))]
    timed = agree(tasks, lambda _: 1)
    assert [(one.task.id, one.start_s) for one in timed] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_demand_goes_before_prefetches():
    make = TaskMaker()
    tasks = [make("do", lane="disk", priority=1 if number in (1, 2) else 0) for number in range(5)]
    timed = agree(tasks, lambda _: 1)
    assert [(one.task.id, one.start_s) for one in timed] == [(0, 0), (3, 1), (4, 2), (1, 3), (2, 4)]


def test_a_small_window_keeps_later_tasks_waiting():
    make = TaskMaker()
    tasks = [make("do", lane="link"), make("do", lane="link"), make("do")]
    timed = agree(tasks, lambda _: 2, 2)
    assert [(one.task.id, one.start_s) for one in timed] == [(0, 0), (1, 2), (2, 2)]


def test_nothing_takes_no_time_and_a_wrong_stream_is_refused():
    assert run_virtually([], lambda _: TaskCost(0, 0, 1)) == []
    with pytest.raises(ValueError, match="do not come before"):
        run_virtually([Task(0, "do", None, None, COMPUTE, (0,))], lambda _: TaskCost(0, 0, 1))


def test_a_lane_does_what_waits_and_joins_as_one():
    """While task 0 keeps the lane, 1 to 4 come to wait; 2 and 4 join 1, which is first; each has a part of the time."""
    make = TaskMaker()
    ops = ["first", "even", "even", "odd", "even"]
    tasks = [make(op, lane="other") for op in ops]
    timed = run_joining(
        tasks,
        lambda joined: TaskCost(6.0 * len(joined), 0, 1.0 + 0.5 * (len(joined) - 1)),
        lambda one, other: one.op == other.op,
    )
    assert [one.task.id for one in timed] == [0, 1, 2, 4, 3]
    assert [one.end_s for one in timed] == pytest.approx([1, 1 + 2 / 3, 1 + 4 / 3, 3, 4])
    assert [one.start_s for one in timed] == pytest.approx([0, *(one.end_s for one in timed[:-1])])
    assert [one.cost.num_bytes for one in timed] == [6] * 5
