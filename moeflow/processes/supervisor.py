"""Engines in parallel that outlive their processes: one queue, and every request continues when its engine dies.

It keeps each submission and its received tokens. Tokens depend neither on other requests nor on interruptions, so a
stream continues in any engine with the same tokens. A crash makes suspects of the requests that were in its
pass; each is then computed alone until it is past that point. One that is alone in a second crash fails, and the others
live.

Requests wait here, first come, first served, until a replica has a free place. A request goes to the replica with most
of its prompt in the prefix cache, else to the one with the fewest requests (`scheduler/dispatch.py`). A single engine
gets all at
once: there is nothing to choose.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from bisect import insort
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from moeflow.core.engine_config import EngineConfig, SchedulerConfig
from moeflow.core.engine_messages import EngineStats, ModelInfo, Submission, TokenOutput
from moeflow.core.errors import ConfigError, EngineError
from moeflow.core.parallel_config import NodeReplicas
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.kernels.on_demand import on_demand
from moeflow.processes.cluster.ray_launcher import RayLauncher
from moeflow.processes.continuation import Continuation, judge
from moeflow.processes.deaths import Death
from moeflow.processes.engine_host import LocalHost
from moeflow.processes.process_client import ProcessEngine, Progress
from moeflow.processes.replica import Replica, Start
from moeflow.processes.replica_target import ReplicaTarget
from moeflow.processes.restart_limits import MAX_PER_HOUR, RestartLimits
from moeflow.processes.stall import TIMEOUT_S
from moeflow.processes.stats_sum import summed, totals_of, with_totals
from moeflow.scheduler.dispatch import Dispatch

if TYPE_CHECKING:
    from moeflow.core.observation import Question, Sight
    from moeflow.processes.nodes.engine_places import EnginePlaces

with on_demand(__name__):
    from moeflow.processes.cluster import node_engines

logger = logging.getLogger(__name__)

_TARGET_S = 1.0  # how often the number of replicas is compared with the load
_PLACE_S = 60.0  # an estimate: a place on another machine may appear at any time
_LOOK_S = 0.02  # how often a shutdown looks whether all requests have ended
_BEST_FIRST = (EngineState.READY, EngineState.RESTARTING, EngineState.DRAINING, EngineState.STALLED)


class Supervisor:
    """An `EngineClient` over replicas of an engine. Make one with `start`, end it with `shutdown`."""

    def __init__(
        self,
        starts: Sequence[Start],
        make_limits: Callable[[], RestartLimits],
        on_failure: Callable[[], None] | None = None,
        *,
        scheduler: SchedulerConfig,
        launcher: RayLauncher | None = None,
        places: EnginePlaces | None = None,
        target: ReplicaTarget | None = None,
    ) -> None:
        """Nothing is started before `load`. `starts` has one for each replica, for which `make_limits` is called.

        `scheduler` configures that of each engine. `launcher` has started keepers; it ends with the engines, and so do
        the `places` of keepers. `target` decides their number.
        """
        self._make_limits = make_limits
        self._scheduler = scheduler
        self._first_start = starts[0]
        is_alone = len(starts) == 1 and (places is None or places.ranks.has_first_here)
        self._replicas = [
            self._make_replica("the engine" if is_alone else f"replica {number}", start)
            for number, start in enumerate(starts)
        ]
        self._draining: list[Replica] = []  # their machines leave, and others have their places
        self._removed = EngineStats()  # totals of replicas that are no more
        self._model: ModelInfo | None = None  # that each engine serves, once the first is loaded
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_failure = on_failure
        self._launcher = launcher
        self._places = places
        self._target = target
        self._first_tokens = None if target is None else target.first_tokens
        self._queue: list[Continuation] = []  # that no replica has, in the order of their places
        self._rule = Dispatch()
        self._end = ""  # why no engine will come any more

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        num_replicas: int = 1,
        *,
        nodes: NodeReplicas | None = None,
        max_restarts: int = MAX_PER_HOUR,
        timeout_s: float = TIMEOUT_S,
        on_begun: Callable[[Supervisor], None] | None = None,
        on_progress: Progress | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> Supervisor:
        """Start so many engines of one configuration and return once all are ready. With `nodes`, their
        processes are on other machines, and only the first must be ready.

        Each is started again at most `max_restarts` times within an hour. `on_progress` reports the loading of the
        first, `on_failure` is called when the last has died for good. `on_begun` gets the supervisor before engines
        load. `timeout_s` and errors: see `ProcessEngine.start` and `RayLauncher.start`.
        """
        places, launcher = (None, None) if nodes is None else await node_engines.start_places(config, nodes)
        num_replicas = num_replicas if nodes is None else nodes.number
        launch = LocalHost.launch if places is None else places.launch
        supervisor = cls(
            [partial(ProcessEngine.start, config, launch=launch, timeout_s=timeout_s)] * num_replicas,
            partial(RestartLimits, max_restarts),
            on_failure,
            scheduler=config.scheduler,
            launcher=launcher,
            places=places,
            target=_target_of(nodes),
        )
        if on_begun is not None:
            on_begun(supervisor)
        await supervisor.load(on_progress)
        return supervisor

    async def load(self, on_progress: Progress | None = None) -> None:
        """Start all engines: first one alone, which writes what the others then find, then these at once.

        Raises: what keeps one from loading; nothing is left of the others.
        """
        first, *others = self._replicas
        try:
            loading = self._load_first(first, on_progress)
            await (loading if self._launcher is None else self._launcher.unless_refused(loading))
            self._model = first.engine.model
            if self._places is not None:
                for replica in others:
                    replica.load_later()
                if self._target is not None:
                    self._start_task(self._follow(self._target))
                return
            results = await asyncio.gather(*(replica.load() for replica in others), return_exceptions=True)
            for result in results:
                if result is not None:
                    raise result
        except BaseException:
            await self._shut_down_all(0)
            raise

    async def _load_first(self, first: Replica, on_progress: Progress | None) -> None:
        """Load an engine, on other machines in one place after the other. Raises: as `load`."""
        while not first.has_loaded:
            try:
                await first.load(on_progress)
            except EngineError as error:
                if self._places is None or not error.is_from_outside:
                    raise
                logger.warning("%s does not start in one place; it waits for another (%s)", first.name, error)

    def _make_replica(self, name: str, start: Start) -> Replica:
        return Replica(name, start, self._make_limits(), self, self._scheduler)

    @property
    def fixed_reason(self) -> str:
        """Why the number of replicas cannot be changed, with what to start instead; "" if it can."""
        if self._places is None or self._places.ranks.has_first_here:
            return "the number of engines on one machine is fixed: start with --replicas and --ray-address"
        return ""

    def scale(self, num_replicas: int) -> None:
        """Have this number of replicas on other machines. New ones begin once they have a place there; requests of
        removed ones continue in others.

        Raises: ConfigError if replicas are processes of this machine, or none would be left; EngineError after the end.
        """
        if self._end:
            raise EngineError(self._end)
        places, launcher = self._places, self._launcher
        if places is None or self.fixed_reason:
            raise ConfigError(self.fixed_reason)
        if num_replicas < 1:
            raise ConfigError("at least one replica must stay")
        names = {replica.name for replica in self._replicas}
        free = (name for each in itertools.count() if (name := f"replica {each}") not in names)
        added = [self._make_replica(next(free), self._first_start) for _ in range(num_replicas - len(self._replicas))]
        removed = self._least_needed(len(self._replicas) - num_replicas)
        self._replicas = [*(replica for replica in self._replicas if replica not in removed), *added]
        number = places.add_keepers(len(added))
        if launcher is not None:
            launcher.start_more(number)
        for replica in added:
            replica.load_later()
        for replica in removed:
            self._move_requests(replica)
            self._note_removed(replica)
            self._start_task(self._retire(replica, places))
        self._dispatch()

    def _least_needed(self, number: int) -> list[Replica]:
        """Return replicas to remove: first any that never had an engine, then any without one now, then the newest."""
        by_need = sorted(reversed(self._replicas), key=lambda it: (it.has_loaded, it.state is EngineState.READY))
        return by_need[: max(number, 0)]

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, target: ReplicaTarget) -> None:
        """Have as many replicas as the load needs, as long as this serves."""
        while not self._end:
            await asyncio.sleep(_TARGET_S)
            statuses = [replica.status for replica in self._replicas]
            stats = [status.stats for status in statuses]
            number = target.note(
                num_requests=len(self._unfinished()),
                num_places=self._engine_model.max_num_seqs,
                kv_blocks=sum(each.kv_blocks_used / max(each.kv_blocks_total, 1) for each in stats),
                num_ready=sum(status.state is EngineState.READY for status in statuses),
                number=len(self._replicas),
            )
            if number != len(self._replicas) and not self._end:
                logger.warning("%d replicas instead of %d, as the load needs", number, len(self._replicas))
                self.scale(number)

    async def _retire(self, replica: Replica, places: EnginePlaces) -> None:
        """End a replica without requests, and have one keeper leave."""
        await replica.shutdown(0)
        places.release()

    @property
    def model(self) -> ModelInfo:
        """The served model, with the total capacity of the engines."""
        model, number = self._engine_model, len(self._replicas)
        return msgspec.structs.replace(
            model,
            max_num_seqs=number * model.max_num_seqs,
            kv_capacity_tokens=number * model.kv_capacity_tokens,
        )

    @property
    def _engine_model(self) -> ModelInfo:
        assert self._model is not None, "the first engine is loaded first"
        return self._model

    @property
    def _all(self) -> list[Replica]:
        return [*self._replicas, *self._draining]

    @property
    def state(self) -> EngineState:
        """See `EngineClient.state`: the best that a replica is."""
        states = {replica.state for replica in self._replicas}
        return next((state for state in _BEST_FIRST if state in states), EngineState.GONE)

    @property
    def back_in_s(self) -> float:
        """See `EngineClient.back_in_s`."""
        if self.state is not EngineState.RESTARTING:
            return 0.0
        restarting = (it for it in self._replicas if it.state is EngineState.RESTARTING and it.has_loaded)
        return min((replica.back_in_s for replica in restarting), default=_PLACE_S)

    def replicas(self) -> list[ReplicaStatus]:
        """See `EngineClient.replicas`."""
        return [replica.status for replica in self._all]

    async def look(self, question: Question) -> dict[int, Sight]:
        """See `EngineClient.look`: all replicas get the question at the same time."""
        sights = await asyncio.gather(*(replica.ask(question) for replica in self._all))
        return {place: sight for place, sight in enumerate(sights) if sight is not None}

    def stats(self) -> EngineStats:
        """Return the newest combined snapshot of all replicas, with totals of removed ones and requests that wait."""
        stats = with_totals(summed([replica.status.stats for replica in self._all]), self._removed)
        return msgspec.structs.replace(
            stats,
            num_waiting=stats.num_waiting + len(self._queue),
            num_batch_waiting=stats.num_batch_waiting + sum(request.submission.is_batch for request in self._queue),
        )

    async def stream(self, submission: Submission) -> AsyncGenerator[TokenOutput, None]:
        """Submit and yield outputs; see `EngineClient.stream`. While no engine has a place, wait for one."""
        if self._end:
            raise EngineError(self._end)
        request = Continuation(submission)
        if self._first_tokens is not None:
            self._first_tokens.note_arrival(submission)
        try:
            self._enqueue(request)
            self._dispatch()
            is_last = False
            while not is_last:
                output = await request.outputs.get()
                if output is None:
                    raise EngineError(self._end)
                is_last = output.finish_reason is not None
                if self._first_tokens is not None:
                    self._first_tokens.note_output(output)
                yield output
        finally:
            self._forget(request)
            if self._first_tokens is not None:
                self._first_tokens.forget(submission.request_id)

    async def shutdown(self, deadline_s: float) -> None:
        """Let all requests finish within the deadline, cancel the rest, end the processes.

        Until then an engine that dies is started again, and has its requests taken over, as ever.
        """
        last_s = time.monotonic() + deadline_s
        self._end = self._end or "the engine has been shut down"
        while self._unfinished() and time.monotonic() < last_s and self.state is not EngineState.GONE:
            await asyncio.sleep(_LOOK_S)
        await self._shut_down_all(0)
        self._end_requests()

    def note_death(self, replica: Replica, death: Death, orphans: list[Continuation]) -> None:
        """See `Owner`: its requests go on elsewhere at once, unless it has died of one of them."""
        for request in orphans:
            self._enqueue(request)
        requests = {request.submission.request_id: request for request in self._unfinished()}
        guilty = judge(death, requests)
        if guilty is not None:
            request_id = guilty.submission.request_id
            logger.error("request %s fails: the engine has died of it again (%s)", request_id, death.reason)
            self._forget(guilty)
            reason = f"the engine process died of this request, and again when it was computed alone ({death.reason})"
            guilty.fail(reason)
            replica.note_progress()
        self._end_drained()
        others = f"; its {len(orphans)} requests continue in others" if len(self._replicas) > 1 else ""
        logger.error("%s has died (%s)%s", replica.name, death.reason, others)
        self._dispatch()

    def note_change(self, replica: Replica) -> None:
        """See `Owner`: perhaps it has a place now, or needs to be relieved."""
        if replica.state is EngineState.DRAINING and replica in self._replicas and not self._end:
            self._replace(replica)
        if len(self._all) > 1:
            replica.compare(other for other in self._replicas if other is not replica)
            self._relieve()
            self._end_drained()
        if replica.end and self.state is EngineState.GONE and not self._end:
            self._end = replica.end
            self._end_requests()
            if self._on_failure is not None:
                self._on_failure()
        if len(self._replicas) == 1 or self._has_place_for_next(replica):
            self._dispatch()

    def _has_place_for_next(self, replica: Replica) -> bool:
        """Whether a replica has a place for the first request of the queue. Each reports when it may have one, so none
        need ask the others after every pass.
        """
        if not self._queue or replica.state not in (EngineState.READY, EngineState.DRAINING):
            return False
        first = self._queue[0]
        return replica.load_before(first).has_room(is_batch=first.submission.is_batch)

    def _replace(self, replica: Replica) -> None:
        """Have another engine for one whose machine leaves."""
        logger.warning("%s leaves %s", replica.name, replica.status.host)
        other = self._make_replica(replica.name, self._first_start)
        self._replicas[self._replicas.index(replica)] = other
        self._draining.append(replica)
        other.load_later()

    def _relieve(self) -> None:
        """Have the requests of replicas that do not answer, or leave, continue in a ready one, if there is any."""
        if self.state is not EngineState.READY:
            return
        for replica in self._all:
            if replica.requests and (replica.state is EngineState.STALLED or replica in self._draining):
                self._move_requests(replica)
                self._dispatch()

    def _end_drained(self) -> None:
        """End the engines of machines that leave once they have no requests, unless they may get some."""
        is_needed = bool(self._end) or (bool(self._queue) and self.state is not EngineState.READY)
        for replica in [each for each in self._draining if not list(each.requests)]:
            if not is_needed or replica.state is not EngineState.DRAINING:
                self._draining.remove(replica)
                self._note_removed(replica)
                self._start_task(replica.shutdown(0))

    def _note_removed(self, replica: Replica) -> None:
        self._removed = totals_of(with_totals(replica.status.stats, self._removed))

    def _move_requests(self, replica: Replica) -> None:
        """Queue the requests of a replica for others."""
        for request in list(replica.requests):
            replica.withdraw(request)
            self._enqueue(request)

    def _enqueue(self, request: Continuation) -> None:
        insort(self._queue, request, key=lambda each: each.place)

    def _dispatch(self) -> None:
        """Send waiting requests to replicas, in order, while there are places."""
        while self._queue and (replica := self._choose(self._queue[0])) is not None:
            replica.submit(self._queue.pop(0))

    def _choose(self, request: Continuation) -> Replica | None:
        """Return the replica for a request; None: it has to wait. While none is ready, leaving ones get some."""
        if len(self._replicas) == 1 and self._replicas[0].state in (EngineState.READY, EngineState.STALLED):
            return self._replicas[0]
        replicas, able = self._replicas, EngineState.READY
        if self.state is not EngineState.READY:
            replicas, able = self._all, EngineState.DRAINING
        loads = [it.load_before(request) if it.state is able else None for it in replicas]
        chosen = self._rule.choose(loads, is_batch=request.submission.is_batch)
        return None if chosen is None else replicas[chosen]

    def _forget(self, request: Continuation) -> None:
        """Remove this request from the queue and all replicas."""
        if request in self._queue:
            self._queue.remove(request)
        for replica in self._all:
            replica.withdraw(request)

    def _unfinished(self) -> list[Continuation]:
        return [*self._queue, *(request for replica in self._all for request in replica.requests)]

    async def _shut_down_all(self, deadline_s: float) -> None:
        await asyncio.gather(*(replica.shutdown(deadline_s) for replica in self._all), *self._tasks)
        if self._places is not None:
            self._places.close()
        if self._launcher is not None:
            await self._launcher.close()

    def _end_requests(self) -> None:
        for request in self._unfinished():
            request.outputs.put_nowait(None)
        self._queue.clear()


def _target_of(nodes: NodeReplicas | None) -> ReplicaTarget | None:
    """Return how the load decides the number of replicas; None: the number is fixed."""
    if nodes is None or nodes.most == nodes.number:
        return None
    return ReplicaTarget(nodes.number, nodes.most, nodes.first_token_s)
