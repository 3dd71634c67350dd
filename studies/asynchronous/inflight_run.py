"""Batches in flight on devices that share experts, on the virtual clock: with barriers and without.

What each device gets follows from routers and mapper. Costs are those of `planner/costs/model_costs.py` by the roofline
and of one link a device; permuting rows is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeflow.core.hardware import Link, MemoryLevel
from moeflow.parallel.placement.placement import ExpertIds
from moeflow.pipeline.task import Task
from moeflow.planner.costs.model_costs import KernelWork, ModelCosts
from moeflow.planner.costs.roofline import work_seconds
from moeflow.planner.costs.task_costs import TaskCost
from moeflow.planner.simulator.time_line import TimeLine
from moeflow.planner.simulator.virtual_clock import run_virtually
from studies.asynchronous.expert_parallel import (
    ATTEND,
    BARRIER,
    COMBINE,
    DISPATCH,
    EXPERTS,
    Batches,
    asynchronous,
    device_lane,
    rounds,
    synchronous,
)
from studies.asynchronous.joining_clock import run_joining
from studies.asynchronous.mapper import Mapper
from studies.parallel.layer_cost import COPY_PASSES

SYNCHRONOUS: Final = "synchronous"
SCHEDULES: Final[Mapping[str, Callable[[Batches], Iterator[Task]]]] = {
    SYNCHRONOUS: synchronous,
    "asynchronous": asynchronous,
}
Route = Callable[[int, int], ExpertIds]  # (layer, batch) -> topk_ids [T, K]


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Batches of decoding sequences, one token each, on devices that are alike."""

    level: MemoryLevel  # where a device computes
    link: Link | None  # from a device to the others; None: through the memory of the host that all are processes of
    costs: ModelCosts
    num_layers: int
    num_devices: int
    num_batches: int
    batch_size: int  # sequences
    context: int  # tokens of each


class InFlightRun:
    """One pass of all batches."""

    def __init__(self, at: InFlight, route: Route, mapper: Mapper, schedule: str) -> None:
        """Map and run; `schedule` is a key of `SCHEDULES`."""
        self._at = at
        homes = [mapper.home(batch, at.batch_size) for batch in range(at.num_batches)]
        shape = (at.num_layers, at.num_batches, at.num_devices)
        self._pairs = np.zeros((*shape, at.costs.shape.routing.num_experts), np.int32)  # of each expert at each device
        self._rows = np.zeros(shape, np.int64)  # tokens that reach each device
        for layer in range(at.num_layers):
            for batch, home in enumerate(homes):
                topk_ids = route(layer, batch)
                self._count(layer, batch, topk_ids, mapper.owners(layer, home, topk_ids))
        self._batches = Batches(at.num_layers, at.num_devices, homes, self._reached)
        self._rounds = [list(batches) for batches in rounds(self._batches)]
        window = 8 * at.num_batches * (at.num_devices + 2)  # unlike the executor's: devices are many
        tasks = SCHEDULES[schedule](self._batches)
        if schedule == SYNCHRONOUS:
            self.line = TimeLine(run_virtually(tasks, self._cost_of_section, window=window))
        else:
            self.line = TimeLine(run_joining(tasks, self._cost_of_arrived, _is_same_layer, window=window))

    @property
    def seconds(self) -> float:
        """Of the pass, until all batches are through."""
        return self.line.seconds

    @cached_property
    def idle_shares(self) -> NDArray[np.floating]:
        """Each device's idle share of the time, [D]."""
        return np.array([self.line.use(device_lane(device)).idle_share for device in range(self._at.num_devices)])

    def _count(self, layer: int, batch: int, topk_ids: ExpertIds, owners: ExpertIds) -> None:
        np.add.at(self._pairs[layer, batch], (owners.ravel(), topk_ids.ravel()), 1)
        for device in range(self._at.num_devices):
            self._rows[layer, batch, device] = (owners == device).any(axis=1).sum()

    def _reached(self, layer: int, batch: int) -> list[int]:
        found: list[int] = np.flatnonzero(self._rows[layer, batch]).tolist()
        return found

    def _cost_of_arrived(self, tasks: Sequence[Task]) -> TaskCost:
        """Return the cost of experts for all batches whose tokens have arrived, or of one other task."""
        layer = tasks[0].layer
        assert layer is not None
        return self._cost(tasks[0], layer, [task.micro_batch for task in tasks if task.micro_batch is not None])

    def _cost_of_section(self, task: Task) -> TaskCost:
        """Return the cost of a task of a batch, or of all batches of a round."""
        assert task.layer is not None
        assert task.micro_batch is not None
        is_joint = task.op in (EXPERTS, COMBINE)
        return self._cost(task, task.layer, self._rounds[task.micro_batch] if is_joint else [task.micro_batch])

    def _cost(self, task: Task, layer: int, batches: list[int]) -> TaskCost:
        if task.op == BARRIER:
            return TaskCost(0, 0, 0)
        device = int(task.lane.rsplit(" ", 1)[1])
        if task.op == ATTEND:
            return self._computed(*self._attention())
        if task.op == EXPERTS:
            pairs = self._pairs[layer, batches, device].sum(axis=0)
            work = self._at.costs.experts(pairs.sum() / self._at.costs.shape.routing.top_k, int((pairs > 0).sum()))
            return self._computed(work)
        return self._sent(self._num_sent(task.op, layer, batches, device))

    def _num_sent(self, op: str, layer: int, batches: list[int], device: int) -> int:
        """Return the rows that a device sends: its own tokens, or the results of those of others."""
        rows = self._rows[layer, batches]
        if op == DISPATCH:
            return int(rows.sum() - rows[:, device].sum())
        assert op == COMBINE
        is_other = np.array([self._batches.homes[batch] != device for batch in batches])
        return int(rows[is_other, device].sum())

    def _attention(self) -> tuple[KernelWork, ...]:
        costs, size = self._at.costs, self._at.batch_size
        stages = costs.pre_attention(size), costs.decode_attention(size, self._at.context)
        return *stages, *costs.until_experts(size)

    def _computed(self, *works: KernelWork) -> TaskCost:
        seconds = sum(work_seconds(self._at.level, work) for work in works)
        return TaskCost(sum(work.num_bytes for work in works), sum(work.num_flops for work in works), seconds)

    def _sent(self, num_rows: int) -> TaskCost:
        costs = self._at.costs
        num_bytes = num_rows * costs.shape.hidden_size * costs.formats.activation_bytes
        messages = min(self._at.num_devices - 1, num_rows)
        if not messages:
            return TaskCost(num_bytes, 0, 0.0)
        if self._at.link is None:
            return TaskCost(num_bytes, 0, COPY_PASSES * num_bytes / self._at.level.read_bytes_per_s)
        return TaskCost(num_bytes, 0, self._at.link.seconds(num_bytes, num_bytes / messages))


def _is_same_layer(first: Task, other: Task) -> bool:
    """Return whether a device computes both at once, reading each expert once."""
    return first.op == other.op == EXPERTS and first.layer == other.layer
