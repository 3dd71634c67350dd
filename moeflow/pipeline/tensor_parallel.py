"""Cuts the tasks of a pipeline for several devices that share each layer: their parts of a sum meet in all-reduces.

All devices run the same stream. After attention's output projection, and after the network, each has a part of a sum.
An all-reduce adds up the parts of one micro-batch, while devices compute others. All-reduces come one after another,
in the order of the stream, so that devices agree on the next one without messages. Source: MoE-Lightning 4.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from moeflow.pipeline.offloading import OP_LANES
from moeflow.pipeline.task import COMPUTE, Task

_CUT = "post_attention"
_STEPS = ("project_part", "sum_attention", "network_part", "sum_network", "add_network")


def sharing_layers(tasks: Iterable[Task]) -> Iterator[Task]:
    """Yield a pipeline's tasks with each `post_attention` in five steps, two of them all-reduces."""
    cutting = _Cutting()
    for task in tasks:
        if task.op == _CUT:
            yield from cutting.steps(task)
        else:
            yield cutting.placed(task)


class _Cutting:
    """Numbers the tasks anew."""

    def __init__(self) -> None:
        self._next_id = 0
        self._stand_ins: dict[int, int] = {}  # by number in the pipeline: the task that others wait for in its place
        self._added: dict[int | None, int] = {}  # by micro-batch: the latest task that has its hidden states
        self._last_sum: int | None = None

    def placed(self, task: Task) -> Task:
        """Return a task that stays one; where it computes it also waits for its micro-batch."""
        after = [self._stand_ins[number] for number in task.after]
        if task.lane == COMPUTE and task.micro_batch in self._added:
            after.append(self._added[task.micro_batch])
        self._stand_ins[task.id] = self._next_id
        return self._numbered(task, task.op, after)

    def steps(self, task: Task) -> Iterator[Task]:
        """Yield the steps of a task; other micro-batches, and the weights, wait for its own computing alone."""
        project, sum_attention, network, sum_network, add = _STEPS
        projected = self._numbered(task, project, [self._stand_ins[number] for number in task.after])
        yield projected
        summed = self._sum(task, sum_attention, projected)
        yield summed
        computed = self._numbered(task, network, [summed.id])
        yield computed
        summed = self._sum(task, sum_network, computed)
        yield summed
        added = self._numbered(task, add, [summed.id])
        yield added
        self._stand_ins[task.id], self._added[task.micro_batch] = computed.id, added.id

    def _sum(self, task: Task, op: str, part: Task) -> Task:
        before = [] if self._last_sum is None else [self._last_sum]
        self._last_sum = self._next_id
        return self._numbered(task, op, [part.id, *before])

    def _numbered(self, task: Task, op: str, after: Iterable[int]) -> Task:
        number, self._next_id = self._next_id, self._next_id + 1
        lane = task.lane if op == task.op else OP_LANES.get(op, COMPUTE)
        return replace(task, id=number, op=op, lane=lane, after=tuple(dict.fromkeys(after)))
