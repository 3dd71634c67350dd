"""A stream of tasks on a virtual clock: who would run when, if each task took as long as a cost function returns.

The rules are the executor's (`pipeline/runtime/executor.py`), down to how far it reads ahead
(`pipeline/runtime/window.py`) and in which order it starts what becomes free, so that a prediction differs from the
real thing in its durations only. Whoever calls the executor is the lane "compute"; the others begin the most urgent of
what waits for them, and among equals what has waited longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from moeflow.pipeline.runtime.window import WINDOW, Window
from moeflow.pipeline.task import COMPUTE, Task
from moeflow.planner.costs.task_costs import TaskCost

CostOf = Callable[[Task], TaskCost]
JointCostOf = Callable[[Sequence[Task]], TaskCost]
Joins = Callable[[Task, Task], bool]


class TimedTask(NamedTuple):
    """A task, and when it ran."""

    task: Task
    cost: TaskCost
    start_s: float
    end_s: float


def run_virtually(tasks: Iterable[Task], cost_of: CostOf, *, window: int = WINDOW) -> list[TimedTask]:
    """Return when each task runs, in the order in which they end; each lane does one task at a time.

    Raises: ValueError if the stream is none.
    """
    return _Run(tasks, lambda joined: cost_of(joined[0]), window).go()


def run_joining(tasks: Iterable[Task], cost_of: JointCostOf, joins: Joins, *, window: int = WINDOW) -> list[TimedTask]:
    """Do the same, but a lane that begins a task does all tasks that wait for it and join that one, too, as one.

    Each is then timed as an equal part of them. The lane "compute" joins nothing.
    """
    return _Run(tasks, cost_of, window, joins).go()


class _Entry:
    """A task that was read and is not done."""

    __slots__ = ("num_missing", "successors", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.num_missing = 0
        self.successors: list[_Entry] = []

    def __lt__(self, other: _Entry) -> bool:
        return (self.task.priority, self.task.id) < (other.task.priority, other.task.id)


class _Lane:
    """What waits for a lane, and whether the lane is busy."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, int, _Entry]] = []  # a heap: priority, number, entry
        self.is_busy = False


class _Run:
    """One stream on its way."""

    def __init__(
        self, tasks: Iterable[Task], cost_of: JointCostOf, window: int, joins: Joins = lambda first, other: False
    ) -> None:
        self.cost_of = cost_of
        self.joins = joins
        self.window = Window(tasks, window)
        self.now_s = 0.0
        self.numbers = count()
        self.unfinished: dict[int, _Entry] = {}
        self.ready: list[_Entry] = []  # a heap: what the caller can do
        self.lanes = defaultdict[str, _Lane](_Lane)
        self.running: dict[int, _Running] = {}  # by number
        self.ends: list[tuple[float, bool, int]] = []  # a heap: of those that end together, the caller's own comes last
        self.done: list[TimedTask] = []

    def go(self) -> list[TimedTask]:
        while True:
            self._read_ahead()
            if self.ready:
                self._do_here(heappop(self.ready))
            elif self.unfinished:
                while self.unfinished and not (self.ready or self.window.has_room(len(self.unfinished))):
                    self._end_next()
            elif self.window.is_at_end:
                return self.done

    def _read_ahead(self) -> None:
        while tasks := self.window.read(len(self.unfinished)):
            for task in tasks:
                self._launch(task)
            if self.ready:
                return

    def _launch(self, task: Task) -> None:
        entry = _Entry(task)
        for before in task.after:
            predecessor = self.unfinished.get(before)
            if predecessor is not None:
                predecessor.successors.append(entry)
                entry.num_missing += 1
        self.unfinished[task.id] = entry
        if not entry.num_missing:
            self._start(entry)

    def _start(self, entry: _Entry) -> None:
        if entry.task.lane == COMPUTE:
            heappush(self.ready, entry)
            return
        lane = self.lanes[entry.task.lane]
        heappush(lane.queue, (entry.task.priority, next(self.numbers), entry))
        self._begin_next(lane)

    def _begin_next(self, lane: _Lane) -> None:
        """Begin what a lane does next, if it is free."""
        if lane.queue and not lane.is_busy:
            lane.is_busy = True
            first = heappop(lane.queue)[2]
            joined = [one for one in lane.queue if self.joins(first.task, one[2].task)]
            if joined:
                lane.queue = [one for one in lane.queue if one not in joined]
                heapify(lane.queue)
            self._begin([first, *(entry for _, _, entry in sorted(joined))], lane)

    def _begin(self, entries: Sequence[_Entry], lane: _Lane | None) -> None:
        number, cost = next(self.numbers), self.cost_of([entry.task for entry in entries])
        self.running[number] = _Running(entries, cost, self.now_s, lane)
        heappush(self.ends, (self.now_s + cost.seconds, lane is None, number))

    def _do_here(self, entry: _Entry) -> None:
        """Advance the clock until the caller has done a task; other lanes work meanwhile."""
        self._begin([entry], None)
        while entry.task.id in self.unfinished:
            self._end_next()

    def _end_next(self) -> None:
        """Advance the clock until a task ends; its lane starts what that frees, then takes another."""
        self.now_s, _, number = heappop(self.ends)
        ended = self.running.pop(number)
        self.done += ended.timed(self.now_s)
        for entry in ended.entries:
            del self.unfinished[entry.task.id]
            for successor in entry.successors:
                successor.num_missing -= 1
                if not successor.num_missing:
                    self._start(successor)
        if ended.lane is not None:
            ended.lane.is_busy = False
            self._begin_next(ended.lane)


class _Running(NamedTuple):
    """A task under way, or several as one."""

    entries: Sequence[_Entry]
    cost: TaskCost
    start_s: float
    lane: _Lane | None  # None: the caller's own

    def timed(self, end_s: float) -> list[TimedTask]:
        """Return each task with its part of the time."""
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
