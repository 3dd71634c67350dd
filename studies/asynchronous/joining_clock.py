"""A virtual clock whose lanes run several waiting tasks as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moeflow.pipeline.runtime.ready_tasks import WINDOW, Entry
from moeflow.pipeline.task import Task
from moeflow.planner.costs.task_costs import TaskCost
from moeflow.planner.simulator.virtual_clock import RunningTask, TimedTask, VirtualLane, VirtualRun

JointCostOf = Callable[[Sequence[Task]], TaskCost]
Joins = Callable[[Task, Task], bool]


def run_joining(tasks: Iterable[Task], cost_of: JointCostOf, joins: Joins, *, window: int = WINDOW) -> list[TimedTask]:
    """Return the times of tasks, where a lane runs its next task and all waiting tasks that join it as one.

    Each task gets an equal part of their time. The lane "compute" joins nothing.
    """
    run = _JoiningRun(tasks, cost_of, joins, window)
    run.run_all()
    return run.done


class _JoiningRun(VirtualRun):
    def __init__(self, tasks: Iterable[Task], cost_of: JointCostOf, joins: Joins, window: int) -> None:
        super().__init__(tasks, lambda task: cost_of([task, *(entry.task for entry in self._joined[task.id])]), window)
        self._joins = joins
        self._joined: dict[int, list[Entry]] = {}  # by the id of the first task

    def begin(self, entry: Entry, lane: VirtualLane | None) -> None:
        """Begin a task, and the waiting tasks that join it."""
        joined = self._joined[entry.task.id] = []
        waiting = [] if lane is None else list(iter(lane.queue.take, None))
        for other in waiting:
            assert lane is not None
            assert other is not None
            if self._joins(entry.task, other.task):
                joined.append(other)
            else:
                lane.queue.put(other, other.task.priority)
        super().begin(entry, lane)

    def end(self, ended: RunningTask) -> None:
        """Record the tasks one after another, each with an equal part of the time."""
        joined = self._joined.pop(ended.entry.task.id)
        if not joined:
            super().end(ended)
            return
        entries = [ended.entry, *joined]
        part_s, cost = (self.now_s - ended.start_s) / len(entries), ended.cost
        part = TaskCost(cost.num_bytes / len(entries), cost.num_flops / len(entries), cost.seconds / len(entries))
        for number, entry in enumerate(entries):
            start_s = ended.start_s + number * part_s
            self.done.append(TimedTask(entry.task, part, start_s, start_s + part_s))
        for entry in entries:
            self.finish(entry)
