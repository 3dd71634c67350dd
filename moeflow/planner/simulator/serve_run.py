"""Traffic on a virtual clock: the real scheduler, and passes that take as long as a cost model returns.

All weights are resident where is computed; nothing overlaps. What HTTP and tokenizer cost is left out. Answers have
the length that the traffic wants.
"""

from __future__ import annotations

import math
from collections import deque
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
from moeflow.scheduler.dispatch import Dispatch, EngineLoad
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
    arrivals: Sequence[Arrival], config: SchedulerConfig, pass_seconds: PassSeconds, num_replicas: int = 1
) -> list[ServedVirtually]:
    """Return how requests fare, in order of arrival, on engines side by side, each on a machine of its own."""
    return _Service(arrivals, config, pass_seconds, num_replicas).run()


class _Service:
    """Engines behind one queue."""

    def __init__(
        self, arrivals: Sequence[Arrival], config: SchedulerConfig, pass_seconds: PassSeconds, num_replicas: int
    ) -> None:
        self._arrivals = arrivals
        self._clock = Clock()
        self._replicas = [_Replica(config, pass_seconds, self._clock) for _ in range(num_replicas)]
        self._rule = Dispatch()
        self._queue: deque[Request] = deque()  # that no engine has
        self._numbers: dict[Request, int] = {}
        self._served: dict[int, ServedVirtually] = {}

    def run(self) -> list[ServedVirtually]:
        """Serve all."""
        while True:
            for replica in self._replicas:
                self._note(replica)
            if len(self._served) == len(self._arrivals):
                return [self._served[number] for number in range(len(self._arrivals))]
            self._let_in()
            self._dispatch()
            for replica in self._replicas:
                replica.begin()
            self._clock.now_s = self._next_event()

    def _note(self, replica: _Replica) -> None:
        """Keep who has ended with an engine's pass, if that is over."""
        for request, first_s in replica.end_pass():
            number = self._numbers[request]
            self._served[number] = ServedVirtually(self._arrivals[number], first_s, self._clock.now_s)

    def _let_in(self) -> None:
        """Queue those who have come by now."""
        while (number := len(self._numbers)) < len(self._arrivals):
            if self._arrivals[number].at_s > self._clock.now_s:
                return
            request = _request(self._arrivals[number])
            self._numbers[request] = number
            self._queue.append(request)

    def _dispatch(self) -> None:
        """Give those who wait to engines, as the supervisor does; a single one gets all at once."""
        while self._queue:
            is_alone = len(self._replicas) == 1
            chosen = 0 if is_alone else self._rule.choose([replica.load for replica in self._replicas])
            if chosen is None:
                return
            self._replicas[chosen].add(self._queue.popleft())

    def _next_event(self) -> float:
        """Return when somebody arrives, a pass ends, or an engine waits no longer."""
        times = [time_s for replica in self._replicas if (time_s := replica.next_s) is not None]
        if (number := len(self._numbers)) < len(self._arrivals):
            times.append(self._arrivals[number].at_s)
        return min(times)


class _Replica:
    """An engine: the scheduler that serves, and the pass under way."""

    def __init__(self, config: SchedulerConfig, pass_seconds: PassSeconds, clock: Clock) -> None:
        is_continuous = config.policy == "continuous"
        self._scheduler: SchedulingPolicy = Scheduler(config) if is_continuous else StaticBatching(config, clock)
        self._config, self._pass_seconds, self._clock = config, pass_seconds, clock
        self._batch: Batch | None = None
        self._begin_s = self._end_s = 0.0  # of the pass
        self._num_waiting = 0  # after the last pass
        self._firsts: dict[Request, float] = {}  # when the first token of those came that it has
        self._unbegun: dict[Request, int] = {}  # tokens of those that have brought none

    @property
    def load(self) -> EngineLoad:
        """What it has to do, as the supervisor sees it."""
        return EngineLoad(
            num_interactive=len(self._firsts) + len(self._unbegun),
            num_waiting=self._num_waiting,
            prefill_tokens=sum(self._unbegun.values()),
            num_places=self._config.max_num_seqs,
            tokens_of_pass=self._config.max_num_batched_tokens,
        )

    def add(self, request: Request) -> None:
        """Take a request."""
        self._unbegun[request] = len(request.prompt_token_ids)
        self._scheduler.add(request)

    def begin(self) -> None:
        """Begin a pass, if none is under way and there is something to do."""
        if self._batch is not None or not self._scheduler.has_work or self._scheduler.held_s:
            return
        self._batch, self._begin_s = self._scheduler.schedule(), self._clock.now_s
        self._end_s = self._begin_s + self._pass_seconds(self._batch)

    @property
    def next_s(self) -> float | None:
        """When its pass ends, or it waits no longer for more to come; None: it has nothing to do."""
        if self._batch is not None:
            return self._end_s
        if not self._scheduler.has_work:
            return None
        now_s = self._clock.now_s
        return max(now_s + self._scheduler.held_s, math.nextafter(now_s, math.inf))  # or time may stand still

    def end_pass(self) -> list[tuple[Request, float]]:
        """Return the requests that end with a pass that is over, and when their first tokens came."""
        batch, now_s = self._batch, self._clock.now_s
        if batch is None or self._end_s > now_s:
            return []
        self._batch = None
        self._scheduler.complete(batch, self._end_s - self._begin_s)
        ended = []
        for request in [entry.request for entry in batch.entries if entry.samples and self._has(entry.request)]:
            if self._unbegun.pop(request, None) is not None:
                self._firsts[request] = now_s
            request.output_token_ids.append(0)
            if len(request.output_token_ids) == request.max_tokens:
                self._scheduler.finish(request, FinishReason.LENGTH)
                ended.append((request, self._firsts.pop(request)))
        self._num_waiting = len(self._scheduler.waiting)
        return ended

    def _has(self, request: Request) -> bool:
        """Return whether a request is one of those that are served, and not what fills a static batch up."""
        return request in self._firsts or request in self._unbegun


def pass_seconds_of(machine: Machine, costs: ModelCosts, num_devices: int = 1) -> PassSeconds:
    """Return the function that returns how long a pass takes where the machine computes."""
    level = machine.compute_level
    processor = processor_of(level)

    def seconds(batch: Batch) -> float:
        tokens, sampled = batch.num_tokens, sum(entry.samples for entry in batch.entries)
        seen = sum(entry.num_tokens * (entry.start + (entry.num_tokens + 1) / 2) for entry in batch.entries)
        read = sum(entry.stop for entry in batch.entries)
        works = costs.pass_works(tokens, costs.attention(tokens, seen, read), sampled)
        if not machine.num_devices:
            works += costs.host_works(tokens, sampled)
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
