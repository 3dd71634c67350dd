"""One engine after the other: when one dies, another is started in its place, as often as the limits allow.

It says at once that it has died, so that its requests need not wait for the restart. Knows what its engine has to do,
but not which request comes next, nor of other replicas.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.engine_messages import EngineStats, ModelInfo, Submission, TokenOutput
from moeflow.core.errors import EngineError
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.processes.continuation import Continuation
from moeflow.processes.deaths import Death
from moeflow.processes.prefix_affinity import PrefixRecord
from moeflow.processes.process_client import Progress
from moeflow.processes.restart_limits import RestartLimits
from moeflow.processes.sinks import Sink
from moeflow.processes.slowness import LEAST_S, SLOWER, LargestPass, SlowWatch
from moeflow.processes.stats_sum import totals_of, with_totals
from moeflow.scheduler.dispatch import EngineLoad

if TYPE_CHECKING:
    from moeflow.core.observation import Question, Sight

logger = logging.getLogger(__name__)


class Mortal(Protocol):
    """An engine that may die: see `ProcessEngine`."""

    @property
    def model(self) -> ModelInfo:
        """What it serves."""

    @property
    def host(self) -> str:
        """Name of the machine that computes; empty: this one."""

    @property
    def activity(self) -> str:
        """Progress of its start."""

    @property
    def state(self) -> EngineState:
        """Whether it runs."""

    @property
    def death(self) -> Death:
        """How it failed."""

    @property
    def pass_s(self) -> float:
        """How long no pass has ended, though there is work."""

    @property
    def longest_pass_s(self) -> float:
        """How long its longest pass has taken."""

    def stats(self) -> EngineStats:
        """Return its newest snapshot."""

    async def ask(self, question: Question) -> Sight | None:
        """Return its answer; None: there is none in time."""

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Submit a request; `sink` gets its outputs as they arrive, or None if the engine ends before it."""

    def abandon(self, request_id: str) -> None:
        """Cancel a request without a reader."""

    async def shutdown(self, deadline_s: float) -> None:
        """Let running requests finish within the deadline, cancel the rest, end it."""


class Start(Protocol):
    """Starts an engine; see `ProcessEngine.start`."""

    async def __call__(
        self,
        *,
        on_begun: Callable[[Mortal], None],
        on_failure: Callable[[], None],
        on_change: Callable[[], None],
        on_progress: Progress | None = None,
    ) -> Mortal:
        """Return it once it is ready; `on_begun` gets it before. Raises: what keeps it from loading."""


class Owner(Protocol):
    """The receiver of a replica's events."""

    def note_death(self, replica: Replica, death: Death, orphans: list[Continuation]) -> None:
        """Its engine has died, and these requests have lost their place. Another engine is on its way."""

    def note_change(self, replica: Replica) -> None:
        """Its engine has finished a pass, is ready, stalls, recovers, or is gone for good."""


class Replica:
    """One of the engines that compute the same model side by side. Begin with `load`, end with `shutdown`."""

    def __init__(self, name: str, start: Start, limits: RestartLimits, owner: Owner, config: SchedulerConfig) -> None:
        """`name` is its name in the log, `config` the configuration of its engines' schedulers."""
        self.name = name
        self._tokens_of_pass = config.max_num_batched_tokens
        self._block_size = config.block_size
        self._prefixes = PrefixRecord(config.block_size, config.num_blocks if config.prefix_caching else 0)
        self._start = start
        self._limits = limits
        self._owner = owner
        self._engine: Mortal | None = None  # until the first is loaded
        self._starting: Mortal | None = None  # the newest that has a place
        self._requests: dict[str, Continuation] = {}  # in the engine
        self._num_batch = 0  # of these
        self._prefills: dict[str, int] = {}  # tokens that interactive ones of these need before they bring any
        self._load_s = 0.0
        self._totals = EngineStats()  # of engines that have died
        self._slowness = SlowWatch()
        self._largest = LargestPass()
        self._num_computed = 0  # tokens, of this engine
        self._restarting: asyncio.Task[None] | None = None
        self._restarting_since_s = 0.0
        self._is_closing = False
        self.end = ""  # why no engine will come any more

    async def load(self, on_progress: Progress | None = None) -> None:
        """Start the first engine, and return once it is ready. Raises: what keeps it from loading."""
        begun_s = time.monotonic()
        self._engine = await self._start_engine(on_progress)
        self._load_s = time.monotonic() - begun_s

    async def _start_engine(self, on_progress: Progress | None = None) -> Mortal:
        try:
            return await self._start(
                on_begun=self._note_begun,
                on_failure=self._note_failure,
                on_change=self._note_change,
                on_progress=on_progress,
            )
        finally:
            self._starting = None

    def _note_begun(self, engine: Mortal) -> None:
        self._starting = engine

    def load_later(self) -> None:
        """Start the first engine once there is a place for it."""
        self._restarting_since_s = time.monotonic()
        self._restarting = asyncio.create_task(self._restart(None))

    @property
    def has_loaded(self) -> bool:
        """Whether an engine has been ready, even if none is now."""
        return self._engine is not None

    @property
    def engine(self) -> Mortal:
        """The newest engine, which may be dead."""
        assert self._engine is not None, "the replica is loaded first"
        return self._engine

    @property
    def state(self) -> EngineState:
        """See `EngineClient.state`. An engine that is gone has died a moment ago: it is noticed only once its last
        messages have been read.
        """
        if self.end:
            return EngineState.GONE
        if self._restarting is not None or self._engine is None:
            return EngineState.RESTARTING
        state = self._engine.state
        return EngineState.RESTARTING if state is EngineState.GONE and not self._is_closing else state

    @property
    def back_in_s(self) -> float:
        """See `EngineClient.back_in_s`: the duration of the last start minus the elapsed time."""
        if self.state is not EngineState.RESTARTING:
            return 0.0
        passed_s = 0.0 if self._restarting is None else time.monotonic() - self._restarting_since_s
        return max(self._load_s - passed_s, 0.0)

    @property
    def is_slow(self) -> bool:
        """Whether others had better get the next requests; see `compare`."""
        return self._slowness.is_slow

    @property
    def status(self) -> ReplicaStatus:
        """Its status; totals are sums over its engines."""
        stats = self._totals
        if self._engine is not None and self._restarting is None and not self.end:
            stats = with_totals(self._engine.stats(), stats)
        stats = msgspec.structs.replace(stats, engine_restarts_total=self._limits.num_restarts)
        engine = self._starting or self._engine
        host, activity = ("", "") if engine is None else (engine.host, engine.activity)
        return ReplicaStatus(self.state, stats, self.is_slow, host, activity)

    async def ask(self, question: Question) -> Sight | None:
        """Return its engine's answer; None: it has no engine now, or that does not answer."""
        if self._engine is None or self._restarting is not None or self.end:
            return None
        return await self._engine.ask(question)

    @property
    def requests(self) -> Iterable[Continuation]:
        """What its engine is to compute."""
        return self._requests.values()

    def load_before(self, request: Continuation) -> EngineLoad:
        """Return what its engine, which is loaded, has to do before a request; how many wait is as of its last pass."""
        stats = self.engine.stats()
        prefixes = request.prefixes(self._block_size)
        return EngineLoad(
            num_interactive=len(self._requests) - self._num_batch,
            num_batch=self._num_batch,
            num_waiting=max(stats.num_waiting - stats.num_batch_waiting, 0),
            prefill_tokens=sum(self._prefills.values()),
            num_places=self.engine.model.max_num_seqs,
            tokens_of_pass=self._tokens_of_pass,
            is_slow=self.is_slow,
            cached_share=self._prefixes.share(prefixes, request.num_tokens),
        )

    def submit(self, request: Continuation) -> None:
        """Have the engine compute a request, or go on with it."""
        submission = request.rest()
        self._prefixes.note(request.prefixes(self._block_size))
        self._requests[submission.request_id] = request
        self._num_batch += submission.is_batch
        if not submission.is_batch:
            num_tokens = len(submission.prompt_token_ids) + len(submission.generated_token_ids)
            self._prefills[submission.request_id] = num_tokens
        self.engine.submit(submission, partial(self._receive, request))

    def withdraw(self, request: Continuation) -> None:
        """The engine is no longer to compute this request, if it is."""
        request_id = request.submission.request_id
        if self._requests.get(request_id) is request:
            self._drop(request)
            self._prefills.pop(request_id, None)
            self.engine.abandon(request_id)

    def compare(self, others: Iterable[Replica]) -> None:
        """Look whether it is slow compared with those of the others that are ready and have computed anything."""
        if self.state is not EngineState.READY or self.engine.pass_s <= SLOWER * LEAST_S:
            return
        known = [other.largest for other in others if other.state is EngineState.READY and other.largest.num_tokens]
        if known:
            num_tokens = self._num_under_way
            self._slowness.note(self.engine.pass_s, max(largest.expect_s(num_tokens) for largest in known))

    @property
    def largest(self) -> LargestPass:
        """The most that its passes were seen to have and to take."""
        return self._largest

    @property
    def _num_under_way(self) -> int:
        """How many tokens the pass under way may have: each decode one, and prompts; those of batch jobs fill it."""
        if self._num_batch:
            return self._tokens_of_pass
        return min(len(self._requests) + sum(self._prefills.values()), self._tokens_of_pass)

    def note_progress(self) -> None:
        """A request has come further, or to an end that it has brought about itself."""
        self._limits.note_progress()

    async def shutdown(self, deadline_s: float) -> None:
        """Let running requests finish within the deadline, cancel the rest, end the engine; none will follow it."""
        self._is_closing = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
            self._restarting = None
        if self._engine is not None:
            await self._engine.shutdown(deadline_s)
        self.end = self.end or "the engine has been shut down"

    def _note_failure(self) -> None:
        """The engine has failed. While it is being shut down, that is its end."""
        if self._is_closing or self.end or self._restarting is not None or self._engine is None:
            return
        death = self._engine.death
        self._totals = totals_of(with_totals(self._engine.stats(), self._totals))
        self._restarting_since_s = time.monotonic()
        self._restarting = asyncio.create_task(self._restart(death))
        orphans, self._requests, self._num_batch = list(self.requests), {}, 0
        self._num_computed = 0
        self._prefixes.clear()
        self._owner.note_death(self, death, orphans)

    def _note_change(self) -> None:
        if self._engine is not None:
            stats, before = self._engine.stats(), self._num_computed
            self._num_computed = stats.prompt_tokens_total + stats.generated_tokens_total
            self._largest.note(self._num_computed - before, self._engine.longest_pass_s)
            self._owner.note_change(self)

    def _receive(self, request: Continuation, output: TokenOutput | None) -> None:
        """Take what the engine reports of a request. Its end without the request's is a reported death."""
        if output is None or output.prompt_progress is None:
            self._prefills.pop(request.submission.request_id, None)
        if output is not None and request.receive(output):
            self._limits.note_progress()
            if request.is_finished:
                if request.submission.request_id in self._requests:
                    self._drop(request)
                self._prefixes.note(request.prefixes(self._block_size))

    def _drop(self, request: Continuation) -> None:
        del self._requests[request.submission.request_id]
        self._num_batch -= request.submission.is_batch

    async def _restart(self, death: Death | None) -> None:
        """Start an engine in the place of the one that died; None: the first."""
        if self._engine is not None:
            with suppress(Exception):  # it is dead
                await self._engine.shutdown(0)
        engine: Mortal | None = None
        while engine is None:
            if death is not None:
                refusal = self._limits.note_death(is_from_outside=death.is_from_outside)
                if refusal:
                    self._give_up(f"{self.name} has died for good ({death.reason}): {refusal}")
                    return
                await asyncio.sleep(self._limits.delay_s)
            begun_s = time.monotonic()
            try:
                engine = await self._start_engine()
            except Exception as error:  # any exception: without an engine, requests would wait for ever
                death = Death(str(error), isinstance(error, EngineError) and error.is_from_outside)
        self._load_s = time.monotonic() - begun_s
        self._engine = engine
        self._restarting = None
        logger.warning("%s is ready after %.1f s", self.name, time.monotonic() - self._restarting_since_s)
        self._owner.note_change(self)

    def _give_up(self, reason: str) -> None:
        logger.error("%s", reason)
        self.end = reason
        self._restarting = None
        self._owner.note_change(self)
