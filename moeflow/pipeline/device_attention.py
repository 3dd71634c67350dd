"""Moves some attention of a pipeline from the host to the device: over prompts, and where keys and values stay there.

The order of the pipeline stays. In place of queries, keys and values that go to the host, the micro-batch's blocks come
to the device. In place of results that come back, new keys and values go to the host, and nothing waits for these. If
a layer's keys and values stay on the device, nothing crosses the link. The device has space for two micro-batches.
Source: MoE-Lightning 4.1 (D4) and 3.3: a prompt's attention has the intensity that suits the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from moeflow.pipeline.offloading import NUM_WINDOWS, OP_LANES
from moeflow.pipeline.task import COMPUTE, Task

_MOVED: Final = ("offload_qkv", "cpu_attention", "load_hidden")


def attending_on_device(
    tasks: Iterable[Task], is_resident: Callable[[int], bool], is_on_device: Callable[[int], bool]
) -> Iterator[Task]:
    """Yield a pipeline's tasks with some attention on the device.

    `is_resident`: whether a layer's keys and values stay there; `is_on_device`: whether a micro-batch attends there.
    """
    moving = _Moving()
    for task in tasks:
        if task.op not in _MOVED:
            yield moving.placed(task, task.op, moving.inputs(task))
            continue
        assert task.layer is not None
        assert task.micro_batch is not None
        if is_resident(task.layer):
            yield from moving.without_transfers(task)
        elif is_on_device(task.micro_batch):
            yield from moving.through_window(task)
        else:
            yield moving.placed(task, task.op, moving.inputs(task))


class _Moving:
    """Numbers the tasks anew."""

    def __init__(self) -> None:
        self._next_id = 0
        self._stand_ins: dict[int, int] = {}  # by number in the pipeline: the task that others wait for in its place
        self._loads: list[int] = []
        self._attended: list[int] = []  # over loaded blocks

    def inputs(self, task: Task) -> list[int]:
        """Return the numbers of the tasks that a task of the pipeline comes after."""
        return [self._stand_ins[number] for number in task.after]

    def placed(self, task: Task, op: str, after: Iterable[int]) -> Task:
        """Return a task with the next number in the place of a task of the pipeline."""
        number, self._next_id = self._next_id, self._next_id + 1
        self._stand_ins[task.id] = number
        return replace(task, id=number, op=op, lane=OP_LANES.get(op, COMPUTE), after=tuple(dict.fromkeys(after)))

    def without_transfers(self, task: Task) -> Iterator[Task]:
        """Yield attention over resident blocks; drop transfers."""
        if task.op == "cpu_attention":
            yield self.placed(task, "device_attention", self.inputs(task))
        else:
            (self._stand_ins[task.id],) = self.inputs(task)

    def through_window(self, task: Task) -> Iterator[Task]:
        """Yield the tasks that take the place of one where the host attends; two windows take turns."""
        if task.op == "offload_qkv":
            before, sent = self.inputs(task), self._loads[-NUM_WINDOWS:]
            freed = self._attended[len(self._loads) - NUM_WINDOWS :][:1] if len(sent) == NUM_WINDOWS else []
            gathered = self.placed(task, "kv_to_pinned", [*before, *sent[: len(freed)]])
            yield gathered
            loaded = self.placed(task, "load_kv", [gathered.id, *sent[-1:], *freed])
            self._loads.append(loaded.id)
            yield loaded
        elif task.op == "cpu_attention":
            attended = self.placed(task, "device_attention", self.inputs(task))
            self._attended.append(attended.id)
            yield attended
        else:
            (attended_id,) = self.inputs(task)
            stored = self.placed(task, "store_kv", [attended_id])
            yield stored
            yield self.placed(task, "save_kv", [stored.id])
            self._stand_ins[task.id] = attended_id
