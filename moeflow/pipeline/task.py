"""A task, and a pipeline as a stream of tasks, earlier ones first.

A pipeline defines the order of a pass and the tasks that may overlap. It touches no tensor. The executor runs the
stream, the simulator charges it to a virtual clock, and the graph is drawn from it. Source: ExpertFlow 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from moeflow.pipeline.priority import DEMAND

COMPUTE = "compute"  # the lane that a pass computes on


class Task(msgspec.Struct, frozen=True):
    """Work that a lane does without interruption, once all tasks in `after` are done."""

    id: int  # of a stream: 0, 1, 2, ...
    op: str
    layer: int | None
    micro_batch: int | None
    lane: str
    after: tuple[int, ...] = ()  # ids of earlier tasks
    priority: int = DEMAND  # among the tasks that its lane could do next


class TaskMaker:
    """Makes the tasks of one stream and numbers them in their order."""

    def __init__(self, lanes: Mapping[str, str] | None = None) -> None:
        """`lanes` has the ops that do not run on `COMPUTE`."""
        self._lanes = lanes or {}
        self._next_id = 0

    def __call__(
        self,
        op: str,
        layer: int | None = None,
        micro_batch: int | None = None,
        *,
        lane: str | None = None,
        after: Iterable[Task | None] = (),
        priority: int = DEMAND,
    ) -> Task:
        """Return the next task, on its op's lane unless one is given.

        A None in `after` stands for a task that the first round of a loop lacks.
        """
        ids = tuple(task.id for task in after if task is not None)
        task = Task(self._next_id, op, layer, micro_batch, lane or self._lanes.get(op, COMPUTE), ids, priority)
        self._next_id += 1
        return task


def checked(tasks: Iterable[Task]) -> Iterator[Task]:
    """Yield the tasks of a valid stream: numbered from 0 on, each task after earlier ones, so that there is no ring.

    Raises: ValueError at the first task that is wrong.
    """
    for number, task in enumerate(tasks):
        if task.id != number:
            raise ValueError(f"task {task.id} ({task.op}) comes where task {number} should")
        if task.after and not (min(task.after) >= 0 and max(task.after) < number):
            raise ValueError(
                f"task {task.id} ({task.op}) waits for {task.after}, but some of these do not come before it"
            )
        yield task
