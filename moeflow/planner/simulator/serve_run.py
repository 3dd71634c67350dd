"""Traffic on a virtual clock: the real scheduler, with pass times from a cost model.

All weights are resident on the computing level, and nothing overlaps. The costs of HTTP and tokenizer are left out.
Answers have the lengths given by the traffic.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

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
    """The times of a request, in seconds since the traffic began."""

    arrival: Arrival
    first_s: float  # time of its first token
    end_s: float


class TrafficClock:
    """The virtual time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def serve_virtually(
    arrivals: Sequence[Arrival], config: SchedulerConfig, pass_seconds: PassSeconds, num_replicas: int = 1
) -> list[ServedVirtually]:
    """Return the times of requests, in order of arrival, on several engines with a machine each."""
    return _Service(arrivals, config, pass_seconds, num_replicas).run()


class _Service:
    """Engines behind one queue."""

    def __init__(
        self, arrivals: Sequence[Arrival], config: SchedulerConfig, pass_seconds: PassSeconds, num_replicas: int
    ) -> None:
        self._arrivals = arrivals
        self._clock = TrafficClock()
        self._replicas = [_Replica(config, pass_seconds, self._clock) for _ in range(num_replicas)]
        self._rule = Dispatch()
        self._queue: deque[Request] = deque()  # in no engine
        self._numbers: dict[Request, int] = {}
        self._served: dict[int, ServedVirtually] = {}
        self._events: list[tuple[float, int]] = []  # a heap: times at which engines have news, and their numbers
        self._changed: set[int] = set()  # engines that may begin a pass now
        self._loads = [replica.load for replica in self._replicas]
        self._waits = False  # the queue's first request: no engine had a place

    def run(self) -> list[ServedVirtually]:
        """Serve all requests."""
        while True:
            if len(self._served) == len(self._arrivals):
                return [self._served[number] for number in range(len(self._arrivals))]
            self._let_in()
            self._dispatch()
            self._begin()
            self._clock.now_s = self._next_event()
            self._end_passes()

    def _begin(self) -> None:
        """Begin passes of engines that have changed, and note their next events."""
        for number in sorted(self._changed):
            replica = self._replicas[number]
            replica.begin()
            if (next_s := replica.next_s) is not None:
                heappush(self._events, (next_s, number))
        self._changed.clear()

    def _end_passes(self) -> None:
        """Record the requests that end with passes that end now."""
        while self._events and self._events[0][0] <= self._clock.now_s:
            _, number = heappop(self._events)
            self._changed.add(number)
            for request, first_s in self._replicas[number].end_pass():
                at = self._numbers[request]
                self._served[at] = ServedVirtually(self._arrivals[at], first_s, self._clock.now_s)

    def _let_in(self) -> None:
        """Queue the requests that have arrived."""
        while (number := len(self._numbers)) < len(self._arrivals):
            if self._arrivals[number].at_s > self._clock.now_s:
                return
            request = _request(self._arrivals[number])
            self._numbers[request] = number
            self._queue.append(request)

    def _dispatch(self) -> None:
        """Dispatch queued requests to engines, as the supervisor does; a single engine gets all at once."""
        is_alone = len(self._replicas) == 1
        for number in self._changed:
            self._loads[number] = self._replicas[number].load
        if self._waits and not any(self._loads[number].has_room(is_batch=False) for number in self._changed):
            return
        while self._queue:
            chosen = 0 if is_alone else self._rule.choose(self._loads)
            if chosen is None:
                break
            self._replicas[chosen].add(self._queue.popleft())
            self._loads[chosen] = self._replicas[chosen].load
            self._changed.add(chosen)
        self._waits = bool(self._queue)

    def _next_event(self) -> float:
        """Return the time when a request arrives, a pass ends, or an engine stops waiting."""
        times = [self._events[0][0]] if self._events else []
        if (number := len(self._numbers)) < len(self._arrivals):
            times.append(self._arrivals[number].at_s)
        return min(times)


class _Replica:
    """An engine: the serving scheduler, and the running pass."""

    def __init__(self, config: SchedulerConfig, pass_seconds: PassSeconds, clock: TrafficClock) -> None:
        is_continuous = config.policy == "continuous"
        self._scheduler: SchedulingPolicy = Scheduler(config) if is_continuous else StaticBatching(config, clock)
        self._config, self._pass_seconds, self._clock = config, pass_seconds, clock
        self._batch: Batch | None = None
        self._begin_s = self._end_s = 0.0  # of the pass
        self._num_waiting = 0  # after the last pass
        self._firsts: dict[Request, float] = {}  # time of the first token of each request
        self._unbegun: dict[Request, int] = {}  # prompt tokens of requests without a first token

    @property
    def load(self) -> EngineLoad:
        """The load that the supervisor sees."""
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
        """Begin a pass, if none is running and a request waits."""
        if self._batch is not None or not self._scheduler.has_work or self._scheduler.held_s:
            return
        self._batch, self._begin_s = self._scheduler.schedule(), self._clock.now_s
        self._end_s = self._begin_s + self._pass_seconds(self._batch)

    @property
    def next_s(self) -> float | None:
        """The time when its pass ends, or when it stops waiting for more requests; None: it is idle."""
        if self._batch is not None:
            return self._end_s
        if not self._scheduler.has_work:
            return None
        now_s = self._clock.now_s
        return max(now_s + self._scheduler.held_s, math.nextafter(now_s, math.inf))  # or time may stand still

    def end_pass(self) -> list[tuple[Request, float]]:
        """Return the requests that end with an ended pass, and the times of their first tokens."""
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
        """Return whether a request is served, and is not padding of a static batch."""
        return request in self._firsts or request in self._unbegun


def pass_seconds_of(machine: Machine, costs: ModelCosts, num_devices: int = 1) -> PassSeconds:
    """Return a function from a batch to the seconds of its pass on the machine's computing level."""
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
    """Return the KV blocks that fit next to the model. Raises: CapacityError if none fits."""
    level = machine.compute_level
    have = level.capacity_bytes * num_devices
    spent = costs.model_bytes + (DEVICE_RESERVE_BYTES * num_devices if machine.num_devices else PROCESS_BYTES)
    blocks = int((have - spent) / (block_size * costs.kv_bytes))
    if blocks < 1:
        raise CapacityError(
            f"the model needs {format_bytes(spent)} in {machine.name}'s {level.name}, which has {format_bytes(have)}. "
            "Take a smaller format, more devices or another machine, or stream weights (moeflow simulate pipeline)"
        )
    return blocks


def _request(arrival: Arrival) -> Request:
    return Request("", arrival.prompt_token_ids, SamplingParams(), max_tokens=arrival.num_new)
