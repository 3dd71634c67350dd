"""The result of a run on the virtual clock: its duration, the idle times of lanes, and the use of device memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from moeflow.pipeline.offloading import DEVICE_TO_HOST, HOST, HOST_TO_DEVICE, HOST_TO_PINNED
from moeflow.pipeline.runtime.trace import Label, Trace
from moeflow.pipeline.runtime.traced_tasks import task_label
from moeflow.pipeline.task import COMPUTE
from moeflow.planner.simulator.virtual_clock import TimedTask

LANES: Final = (COMPUTE, HOST_TO_DEVICE, DEVICE_TO_HOST, HOST, HOST_TO_PINNED)  # in the order of display

_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LaneUse:
    """The work of a lane of one thread in a run."""

    lane: str
    busy_s: float
    idle_share: float
    num_bytes: float
    num_flops: float


class TimeLine:
    """The tasks of a run by lane, in order of their starts. The run begins at 0."""

    def __init__(self, timed: Iterable[TimedTask]) -> None:
        by_lane: dict[str, list[TimedTask]] = defaultdict(list)
        for one in timed:
            by_lane[one.task.lane].append(one)
        names = [lane for lane in LANES if lane in by_lane] + sorted(by_lane.keys() - set(LANES))
        self.lanes = {lane: sorted(by_lane[lane], key=lambda one: (one.start_s, one.end_s)) for lane in names}
        self.seconds = max((ones[-1].end_s for ones in self.lanes.values()), default=0.0)

    def use(self, lane: str) -> LaneUse:
        """Return the work of a lane; a lane without tasks has idled."""
        ones = self.lanes.get(lane, [])
        busy_s = sum(one.cost.seconds for one in ones)
        return LaneUse(
            lane=lane,
            busy_s=busy_s,
            idle_share=1 - busy_s / self.seconds if self.seconds else 0.0,
            num_bytes=sum(one.cost.num_bytes for one in ones),
            num_flops=sum(one.cost.num_flops for one in ones),
        )

    def idle(self, lane: str) -> list[tuple[float, float]]:
        """Return the start and end of each idle time of a lane, in seconds."""
        gaps, free_s = [], 0.0
        for one in self.lanes.get(lane, []):
            if one.start_s > free_s:
                gaps.append((free_s, one.start_s))
            free_s = max(free_s, one.end_s)
        return [*gaps, (free_s, self.seconds)] if free_s < self.seconds else gaps

    def window(self, first_layer: int, end_layer: int) -> tuple[float, float]:
        """Return start and end of some layers, from the previous layer's end to the last post-attention."""
        ends = {one.task.layer: one.end_s for one in self.lanes.get(COMPUTE, []) if one.task.op == "post_attention"}
        start_s = ends.get(first_layer - 1, 0.0)
        return start_s, max(
            (end_s for layer, end_s in ends.items() if layer in range(first_layer, end_layer)), default=self.seconds
        )

    def to_trace(self) -> Trace:
        """Return a trace as of the executor, with idle times as waits, for `pipeline/runtime/perfetto.py`."""
        trace = Trace()
        for lane, ones in self.lanes.items():
            row = trace.row(lane)
            for one in ones:
                task, cost = one.task, one.cost
                label = task_label(task, round(cost.num_bytes), round(cost.num_flops))
                row.record(label, round(one.start_s * _NS), round(one.end_s * _NS))
            for start_s, end_s in self.idle(lane):
                row.record(Label("idle"), round(start_s * _NS), round(end_s * _NS), is_blocked=True)
        return trace


def weight_buffer(line: TimeLine, *, is_warm: bool = False) -> list[tuple[float, float]]:
    """Return (seconds, bytes) at each change of the device memory for streamed weights.

    A page needs memory from the start of its transfer. A layer frees its pages with its last post-attention. A warm
    pass begins with layer 0 on the device.
    """
    events = [
        (one.start_s, 1, one.task.layer, one.cost.num_bytes)
        for one in line.lanes.get(HOST_TO_DEVICE, [])
        if one.task.op == "weights_to_device"
    ]
    ends = {one.task.layer: one.end_s for one in line.lanes.get(COMPUTE, []) if one.task.op == "post_attention"}
    events += [(end_s, 0, layer, 0.0) for layer, end_s in ends.items()]
    held: dict[int | None, float] = defaultdict(float)
    if is_warm:  # layers are alike
        held[0] = sum(num_bytes for _, _, layer, num_bytes in events if layer == (1 if len(ends) > 1 else 0))
    changes, at_start = [], held[0]
    for time_s, is_transfer, layer, num_bytes in sorted(events, key=lambda event: event[:2]):
        changes.append((time_s, num_bytes if is_transfer else -held[layer]))
        held[layer] = held[layer] + num_bytes if is_transfer else 0.0
    return _steps(changes, at_start)


def kv_buffer(line: TimeLine) -> list[tuple[float, float]]:
    """Return (seconds, bytes) at each change of the device memory for fetched keys and values."""
    fetched = {
        (one.task.layer, one.task.micro_batch): one
        for one in line.lanes.get(HOST_TO_DEVICE, [])
        if one.task.op == "load_kv"
    }
    changes = [(one.start_s, one.cost.num_bytes) for one in fetched.values()]
    for one in line.lanes.get(COMPUTE, []):
        place = (one.task.layer, one.task.micro_batch)
        if one.task.op == "device_attention" and place in fetched:
            changes.append((one.end_s, -fetched[place].cost.num_bytes))
    return _steps(changes, 0.0)


def add_steps(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the sum of two such lists."""
    changes = [(0.0, 0.0)]
    for steps in (first, second):
        before = [0.0, *(num_bytes for _, num_bytes in steps)]
        changes += [(time_s, num_bytes - was) for (time_s, num_bytes), was in zip(steps, before, strict=False)]
    return _steps(changes, 0.0)[1:]


def peak(steps: Sequence[tuple[float, float]]) -> float:
    """Return the most bytes at any time."""
    return max((num_bytes for _, num_bytes in steps), default=0.0)


def _steps(changes: Iterable[tuple[float, float]], at_start: float) -> list[tuple[float, float]]:
    """Sum changes up, with those of one moment as one: freed memory is available at once."""
    by_time: dict[float, float] = defaultdict(float)
    for time_s, change in changes:
        by_time[time_s] += change
    steps, now = [(0.0, at_start)], at_start
    for time_s, change in sorted(by_time.items()):
        now += change
        steps.append((time_s, now))
    return steps
