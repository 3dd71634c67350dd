"""A stream of tasks on a virtual clock: the start and end of each task, if it takes as long as a cost function returns.

The rules are those of the executor (`pipeline/runtime/ready_tasks.py` and `urgent_first.py`), so that a prediction
differs from a real run in its durations only. Each lane runs one task at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from moeflow.pipeline.runtime.ready_tasks import WINDOW, Entry, ReadyTasks
from moeflow.pipeline.runtime.urgent_first import UrgentFirst
from moeflow.pipeline.task import Task
from moeflow.planner.costs.task_costs import TaskCost

CostOf = Callable[[Task], TaskCost]
JointCostOf = Callable[[Sequence[Task]], TaskCost]
Joins = Callable[[Task, Task], bool]


class TimedTask(NamedTuple):
    """A task and its time."""

    task: Task
    cost: TaskCost
    start_s: float
    end_s: float


def run_virtually(tasks: Iterable[Task], cost_of: CostOf, *, window: int = WINDOW) -> list[TimedTask]:
    """Return the time of each task, in order of their ends. Raises: ValueError if the stream is invalid."""
    return _timed(_VirtualRun(tasks, lambda joined: cost_of(joined[0]), window))


def run_joining(tasks: Iterable[Task], cost_of: JointCostOf, joins: Joins, *, window: int = WINDOW) -> list[TimedTask]:
    """Return the same, where a lane runs its next task and all waiting tasks that join it as one.

    Each task gets an equal part of their time. The lane "compute" joins nothing.
    """
    return _timed(_VirtualRun(tasks, cost_of, window, joins))


def _timed(run: _VirtualRun) -> list[TimedTask]:
    run.run_all()
    return run.done


class _Lane:
    """The tasks that wait for a lane, and whether the lane is busy."""

    def __init__(self) -> None:
        self.queue = UrgentFirst[Entry]()
        self.is_busy = False


class _VirtualRun(ReadyTasks):
    """One run; the clock stands at `now_s`."""

    def __init__(self, tasks: Iterable[Task], cost_of: JointCostOf, window: int, joins: Joins | None = None) -> None:
        super().__init__(tasks, window)
        self.cost_of = cost_of
        self.joins = joins
        self.now_s = 0.0
        self.numbers = count()
        self.lanes = defaultdict[str, _Lane](_Lane)
        self.ends: list[tuple[float, bool, int, _Running]] = []  # a heap: of equal ends the caller's comes last
        self.done: list[TimedTask] = []

    def submit(self, entry: Entry) -> None:
        lane = self.lanes[entry.task.lane]
        lane.queue.put(entry, entry.task.priority)
        self._begin_next(lane)

    def run_here(self, entry: Entry) -> None:
        self._begin([entry], None)
        while entry.task.id in self.unfinished:
            self._end_next()

    def wait(self) -> None:
        while self.must_wait:
            self._end_next()

    def _begin_next(self, lane: _Lane) -> None:
        """Begin the next task of a lane, if the lane is free."""
        if lane.is_busy or (first := lane.queue.take()) is None:
            return
        lane.is_busy = True
        joins = self.joins
        joined = [] if joins is None else lane.queue.take_all(lambda other: joins(first.task, other.task))
        self._begin([first, *joined], lane)

    def _begin(self, entries: Sequence[Entry], lane: _Lane | None) -> None:
        cost = self.cost_of([entry.task for entry in entries])
        running = _Running(entries, cost, self.now_s, lane)
        heappush(self.ends, (self.now_s + cost.seconds, lane is None, next(self.numbers), running))

    def _end_next(self) -> None:
        """Advance the clock until a task ends; start the tasks that it frees, then the next of its lane."""
        self.now_s, _, _, ended = heappop(self.ends)
        self.done += ended.timed(self.now_s)
        for entry in ended.entries:
            self.finish(entry)
        if ended.lane is not None:
            ended.lane.is_busy = False
            self._begin_next(ended.lane)


class _Running(NamedTuple):
    """A running task, or several as one."""

    entries: Sequence[Entry]
    cost: TaskCost
    start_s: float
    lane: _Lane | None  # None: the caller's

    def timed(self, end_s: float) -> list[TimedTask]:
        """Return each task with its equal part of the time."""
        number = len(self.entries)
        if number == 1:
            return [TimedTask(self.entries[0].task, self.cost, self.start_s, end_s)]
        part_s = (end_s - self.start_s) / number
        cost = TaskCost(self.cost.num_bytes / number, self.cost.num_flops / number, self.cost.seconds / number)
        starts_s = [self.start_s + i * part_s for i in range(number)]
        return [
            TimedTask(entry.task, cost, start_s, start_s + part_s)
            for entry, start_s in zip(self.entries, starts_s, strict=True)
        ]
