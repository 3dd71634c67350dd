"""Tasks of several lanes on one processor, which plays host, device and link at once.

A task computes on one core (Python, copies), then in a kernel on all of them, one kernel at a time, and then sleeps
until what it plays would be over. A kernel waits for the slowest of its threads, so that whatever runs on a core beside
it slows it down by more than its share. Who sleeps, be it a lane, a kernel's threads or the processor, takes time to
wake.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from moeflow.pipeline.task import Task
from moeflow.planner.played_costs import PlayedCost
from moeflow.planner.task_costs import TaskCost

# Measured on two Zen 5 vCPUs:
HANDOFF_S: Final = 3e-5  # until a lane begins what another has freed
SPIN_S: Final = 6e-5  # that a kernel's threads wait for the next one before they sleep
WAKE_S: Final = 1e-4  # that they take to wake
DEEP_S: Final = 1e-3  # of sleep, after which the processor sleeps, too
DEEP_HANDOFF_S: Final = 2.5e-4  # that a lane then takes to wake more than otherwise
DEEP_WAKE_S: Final = 4e-4  # that a kernel's threads then take
SLOWED: Final = 1.5  # by what share of its time one thread on each core slows a kernel down

_BURST_S: Final = 1e-3  # of lateness that a pace makes up for
_NOTHING_S: Final = 1e-9


@dataclass(slots=True)
class _Running:
    """A task under way, and what is left of it."""

    is_last: bool  # of those that end together
    begins_s: float
    over_s: float  # it ends not before
    core_s: float
    kernel_s: float

    @property
    def has_work(self) -> bool:
        return self.core_s > 0 or self.kernel_s > 0


class SharedProcessor:
    """A `Timer` for `PlayedCost`s."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._now_s = 0.0
        self._running: dict[int, _Running] = {}
        self._kernels: deque[int] = deque()  # whose turn it is, one after another
        self._kernel_ended_s = -inf
        self._work_ended_s = -inf
        self._free_at_s: dict[str, float] = {}  # by lane: each has a pace of its own

    def begin(self, number: int, task: Task, cost: TaskCost, now_s: float, *, is_last: bool) -> None:
        """See `Timer`."""
        assert isinstance(cost, PlayedCost)
        begins_s = now_s + HANDOFF_S + (DEEP_HANDOFF_S if self._is_in_deep_sleep() else 0.0)
        over_s = begins_s
        if cost.seconds:
            over_s = max(self._free_at_s.get(task.lane, -inf), begins_s - _BURST_S) + cost.seconds
            self._free_at_s[task.lane] = over_s
        core_s = max(cost.core_s, 2 * _NOTHING_S)  # by way of which it comes to its kernel
        self._running[number] = _Running(is_last, begins_s, max(begins_s, over_s), core_s, cost.kernel_s)

    def next_end(self) -> tuple[float, int]:
        """See `Timer`."""
        while True:
            ended = [(it.is_last, number) for number, it in self._running.items() if self._is_over(it)]
            if ended:
                number = min(ended)[1]
                del self._running[number]
                return self._now_s, number
            self._go_on()

    def _is_over(self, one: _Running) -> bool:
        return not one.has_work and self._now_s >= one.over_s

    def _is_in_deep_sleep(self) -> bool:
        is_working = any(it.has_work for it in self._running.values())
        return not is_working and self._now_s - self._work_ended_s > DEEP_S

    def _go_on(self) -> None:
        """Let time go by until something changes."""
        begun = [(number, it) for number, it in self._running.items() if it.begins_s <= self._now_s]
        on_core = [(number, it) for number, it in begun if it.core_s]
        kernel = self._running[self._kernels[0]] if self._kernels else None
        core_rate, kernel_rate = self._rates(len(on_core), has_kernel=kernel is not None)
        times = [it.begins_s for it in self._running.values() if it.begins_s > self._now_s]
        times += [it.over_s for _, it in begun if not it.has_work]
        times += [self._now_s + it.core_s / core_rate for _, it in on_core]
        if kernel is not None:
            times.append(self._now_s + kernel.kernel_s / kernel_rate)
        passed_s = min(times) - self._now_s
        self._now_s = min(times)
        if kernel is not None:
            kernel.kernel_s = _left(kernel.kernel_s, passed_s * kernel_rate)
            if not kernel.kernel_s:
                self._kernels.popleft()
                self._kernel_ended_s = self._now_s
                self._end_work(kernel)
        for number, it in on_core:
            it.core_s = _left(it.core_s, passed_s * core_rate)
            if it.core_s:
                continue
            if it.kernel_s:
                self._ask_for_kernel(number, it)
            else:
                self._end_work(it)

    def _rates(self, num_on_core: int, *, has_kernel: bool) -> tuple[float, float]:
        """Return at what share of their speed what is on a core and the kernel run."""
        if not has_kernel:
            return min(self._num_cores / max(num_on_core, 1), 1.0), 1.0
        beside = ceil(num_on_core / self._num_cores)
        return 1 / (1 + beside), 1 / (1 + SLOWED * beside)

    def _ask_for_kernel(self, number: int, one: _Running) -> None:
        if not self._kernels:
            slept_s = self._now_s - self._kernel_ended_s
            one.kernel_s += DEEP_WAKE_S if slept_s > 2 * DEEP_S else WAKE_S if slept_s > SPIN_S else 0.0
        self._kernels.append(number)

    def _end_work(self, one: _Running) -> None:
        """Note when the processor had something to do, and that long sleeps end late."""
        self._work_ended_s = self._now_s
        if one.over_s - self._now_s > 2 * DEEP_S:
            one.over_s += DEEP_HANDOFF_S


def _left(seconds: float, done_s: float) -> float:
    left = seconds - done_s
    return left if left > _NOTHING_S else 0.0
