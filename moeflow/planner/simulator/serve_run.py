"""Traffic on a virtual clock: the real scheduler, and passes that take as long as a cost model returns.

All weights are resident where is computed; nothing overlaps. What HTTP and tokenizer cost is left out. Answers have
the length that the traffic wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeflow.core.batch import Batch
from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.errors import CapacityError
from moeflow.core.hardware import Machine
from moeflow.core.request import FinishReason, Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.units import format_bytes
from moeflow.planner.costs.cost_model import DEVICE_RESERVE_BYTES, PROCESS_BYTES
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.roofline import processor_of, work_seconds
from moeflow.scheduler.policy import SchedulingPolicy
from moeflow.scheduler.scheduler import Scheduler
from moeflow.scheduler.static_batching import StaticBatching
from moeflow.workload.poisson import Arrival

PassSeconds = Callable[[Batch], float]


@dataclass(frozen=True, slots=True)
class ServedVirtually:
    """How a request fared. Times in seconds since the traffic began."""

    arrival: Arrival
    first_s: float  # when its first token came
    end_s: float


class Clock:
    """What time it is."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def serve_virtually(
    arrivals: Sequence[Arrival], config: SchedulerConfig, pass_seconds: PassSeconds
) -> list[ServedVirtually]:
    """Return how requests fare, in order of arrival."""
    clock = Clock()
    scheduler: SchedulingPolicy = Scheduler(config) if config.policy == "continuous" else StaticBatching(config, clock)
    numbers: dict[Request, int] = {}
    firsts: dict[int, float] = {}
    served: dict[int, ServedVirtually] = {}
    while len(served) < len(arrivals):
        while len(numbers) < len(arrivals) and arrivals[len(numbers)].at_s <= clock.now_s:
            request = _request(arrivals[len(numbers)])
            numbers[request] = len(numbers)
            scheduler.add(request)
        if not scheduler.has_work or scheduler.held_s:
            clock.now_s = _next_event(clock.now_s, scheduler, arrivals[len(numbers) :])
            continue
        batch = scheduler.schedule()
        elapsed_s = pass_seconds(batch)
        clock.now_s += elapsed_s
        scheduler.complete(batch, elapsed_s)
        for request in [entry.request for entry in batch.entries if entry.samples and entry.request in numbers]:
            number = numbers[request]
            firsts.setdefault(number, clock.now_s)
            request.output_token_ids.append(0)
            if len(request.output_token_ids) == request.max_tokens:
                scheduler.finish(request, FinishReason.LENGTH)
                served[number] = ServedVirtually(arrivals[number], firsts[number], clock.now_s)
    return [served[number] for number in range(len(arrivals))]


def pass_seconds_of(machine: Machine, costs: ModelCosts, num_devices: int = 1) -> PassSeconds:
    """Return the function that returns how long a pass takes where the machine computes."""
    level, shape = machine.compute_level, costs.shape
    processor = processor_of(level)

    def seconds(batch: Batch) -> float:
        tokens, sampled = batch.num_tokens, sum(entry.samples for entry in batch.entries)
        seen = sum(entry.num_tokens * (entry.start + (entry.num_tokens + 1) / 2) for entry in batch.entries)
        read = sum(entry.stop for entry in batch.entries)
        stages = [costs.pre_attention(tokens), costs.attention(tokens, seen, read), costs.output_projection(tokens)]
        works = [(shape.num_layers, work) for work in stages] + costs.feed_forward(tokens)
        works.append((1, costs.head(sampled)))
        if not machine.num_devices:  # their kernels take rows along
            works += [(shape.num_layers, costs.row_operations(tokens)), (1, costs.sampling(sampled))]
        compute_s = sum(count * work_seconds(level, work, num_devices) for count, work in works)
        return compute_s + processor.pass_s + sampled * processor.token_s

    return seconds


def block_count(machine: Machine, costs: ModelCosts, block_size: int, num_devices: int = 1) -> int:
    """Return how many KV blocks there is room for beside the model. Raises: CapacityError if there is none."""
    level = machine.compute_level
    have = level.capacity_bytes * num_devices
    spent = costs.model_bytes + (DEVICE_RESERVE_BYTES * num_devices if machine.num_devices else PROCESS_BYTES)
    blocks = int((have - spent) / (block_size * costs.kv_bytes))
    if blocks < 1:
        raise CapacityError(
            f"the model needs {format_bytes(spent)} in {machine.name}'s {level.name}, which has {format_bytes(have)}: "
            "take a smaller format, more devices or another machine, or stream weights (moeflow simulate pipeline)"
        )
    return blocks


def _request(arrival: Arrival) -> Request:
    return Request("", arrival.prompt_token_ids, SamplingParams(), max_tokens=arrival.num_new)


def _next_event(now_s: float, scheduler: SchedulingPolicy, coming: Sequence[Arrival]) -> float:
    """Return when somebody arrives, or the scheduler waits no longer."""
    times = [coming[0].at_s] if coming else []
    if scheduler.has_work:
        times.append(max(now_s + scheduler.held_s, math.nextafter(now_s, math.inf)))  # or time may stand still
    return min(times)
