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

_ON_DEVICE: Final = {"offload_qkv": "load_kv", "cpu_attention": "device_attention", "load_hidden": "store_kv"}


def attending_on_device(
    tasks: Iterable[Task], is_resident: Callable[[int], bool], is_on_device: Callable[[int], bool]
) -> Iterator[Task]:
    """Yield a pipeline's tasks with some attention on the device.

    `is_resident`: whether a layer's keys and values stay there; `is_on_device`: whether a micro-batch attends there.
    """
    moving = _Moving()
    for task in tasks:
        if task.op not in _ON_DEVICE:
            yield moving.numbered(task, task.op, task.lane)
            continue
        assert task.layer is not None
        assert task.micro_batch is not None
        if is_resident(task.layer):
            yield from moving.without_transfers(task)
        elif is_on_device(task.micro_batch):
            yield moving.through_window(task)
        else:
            yield moving.numbered(task, task.op, task.lane)


class _Moving:
    """Numbers the tasks anew."""

    def __init__(self) -> None:
        self._next_id = 0
        self._stand_ins: dict[int, int] = {}  # by number in the pipeline: the task that others wait for in its place
        self._loads: list[int] = []
        self._attended: list[int] = []  # over loaded blocks

    def numbered(self, task: Task, op: str, lane: str, also_after: Iterable[int] = ()) -> Task:
        """Return a task with a new number, and record it."""
        after = dict.fromkeys((*(self._stand_ins[number] for number in task.after), *also_after))
        number, self._next_id = self._next_id, self._next_id + 1
        self._stand_ins[task.id] = number
        return replace(task, id=number, op=op, lane=lane, after=tuple(after))

    def without_transfers(self, task: Task) -> Iterator[Task]:
        """Yield attention over resident blocks; drop transfers."""
        if task.op == "cpu_attention":
            yield self.numbered(task, "device_attention", COMPUTE)
        else:
            self._stand_ins[task.id] = self._stand_ins[task.after[0]]

    def through_window(self, task: Task) -> Task:
        """Return the task that takes the place of one where the host attends; two windows take turns."""
        op = _ON_DEVICE[task.op]
        also_after: list[int] = []
        if op == "load_kv":
            number = len(self._loads)
            also_after = self._loads[-1:] + ([self._attended[number - NUM_WINDOWS]] if number >= NUM_WINDOWS else [])
            self._loads.append(self._next_id)
        elif op == "device_attention":
            self._attended.append(self._next_id)
        moved = self.numbered(task, op, OP_LANES.get(op, COMPUTE), also_after)
        if op == "store_kv":
            self._stand_ins[task.id] = self._stand_ins[task.after[0]]
        return moved
