"""A stream of tasks on a virtual clock: the start and end of each task, if it takes as long as a cost function returns.

The rules are those of the executor (`pipeline/runtime/ready_tasks.py` and `urgent_first.py`), so that a prediction
differs from a real run in its durations only. Each lane runs one task at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from moeflow.pipeline.runtime.ready_tasks import WINDOW, Entry, ReadyTasks
from moeflow.pipeline.runtime.urgent_first import UrgentFirst
from moeflow.pipeline.task import Task
from moeflow.planner.costs.task_costs import TaskCost

CostOf = Callable[[Task], TaskCost]


class TimedTask(NamedTuple):
    """A task and its time."""

    task: Task
    cost: TaskCost
    start_s: float
    end_s: float


def run_virtually(tasks: Iterable[Task], cost_of: CostOf, *, window: int = WINDOW) -> list[TimedTask]:
    """Return the time of each task, in order of their ends. Raises: ValueError if the stream is invalid."""
    run = VirtualRun(tasks, cost_of, window)
    run.run_all()
    return run.done


class VirtualLane:
    """The tasks that wait for a lane, and whether the lane is busy."""

    def __init__(self) -> None:
        self.queue = UrgentFirst[Entry]()
        self.is_busy = False


class RunningTask(NamedTuple):
    """A task that has begun."""

    entry: Entry
    cost: TaskCost
    start_s: float
    lane: VirtualLane | None  # None: the caller's


class VirtualRun(ReadyTasks):
    """One run; the clock stands at `now_s`."""

    def __init__(self, tasks: Iterable[Task], cost_of: CostOf, window: int) -> None:
        super().__init__(tasks, window)
        self.cost_of = cost_of
        self.now_s = 0.0
        self.done: list[TimedTask] = []
        self._lanes = defaultdict[str, VirtualLane](VirtualLane)
        self._numbers = count()
        self._ends: list[tuple[float, bool, int, RunningTask]] = []  # a heap: of equal ends the caller's comes last

    def submit(self, entry: Entry) -> None:
        """Queue a task in its lane."""
        lane = self._lanes[entry.task.lane]
        lane.queue.put(entry, entry.task.priority)
        self._begin_next(lane)

    def run_here(self, entry: Entry) -> None:
        """Advance the clock until the caller has finished a task; other lanes work meanwhile."""
        self.begin(entry, None)
        while entry.task.id in self.unfinished:
            self._end_next()

    def wait(self) -> None:
        """Advance the clock while the caller must wait."""
        while self.must_wait:
            self._end_next()

    def begin(self, entry: Entry, lane: VirtualLane | None) -> None:
        """Begin a task now."""
        running = RunningTask(entry, self.cost_of(entry.task), self.now_s, lane)
        heappush(self._ends, (self.now_s + running.cost.seconds, lane is None, next(self._numbers), running))

    def end(self, ended: RunningTask) -> None:
        """Record a task that ends now, and start the tasks that it frees."""
        self.done.append(TimedTask(ended.entry.task, ended.cost, ended.start_s, self.now_s))
        self.finish(ended.entry)

    def _begin_next(self, lane: VirtualLane) -> None:
        """Begin the next task of a lane, if the lane is free."""
        if not lane.is_busy and (entry := lane.queue.take()) is not None:
            lane.is_busy = True
            self.begin(entry, lane)

    def _end_next(self) -> None:
        """Advance the clock until a task ends; its lane takes the next task after the freed tasks have started."""
        self.now_s, _, _, ended = heappop(self._ends)
        self.end(ended)
        if ended.lane is not None:
            ended.lane.is_busy = False
            self._begin_next(ended.lane)
