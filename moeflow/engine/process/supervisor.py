"""An engine that outlives its processes: when one dies, another is started and goes on with every request.

It keeps what was asked and which tokens have arrived; tokens do not depend on company or on where a request is cut, so
streams go on with the tokens they would have had. A crash makes suspects of the requests that were in its pass; each is
then computed alone until it is past that point. One that is alone in a second crash fails, and the others live.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Protocol

import msgspec

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import EngineError
from moeflow.engine.client import EngineClient, EngineState
from moeflow.engine.messages import EngineStats, ModelInfo, Submission, TokenOutput
from moeflow.engine.process.continuation import Continuation, judge
from moeflow.engine.process.deaths import Death
from moeflow.engine.process.process_client import ProcessEngine, Progress, Sink
from moeflow.engine.process.restart_limits import MAX_PER_HOUR, RestartLimits
from moeflow.engine.process.stall import TIMEOUT_S

logger = logging.getLogger(__name__)


class Mortal(EngineClient, Protocol):
    """An engine that may die: see `ProcessEngine`."""

    @property
    def death(self) -> Death:
        """How it failed."""

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Submit a request; `sink` gets its outputs as they arrive, or None if the engine ends before it."""

    def abandon(self, request_id: str) -> None:
        """End a request whose outputs nobody wants any more."""


Start = Callable[[Callable[[], None]], Awaitable[Mortal]]  # of an engine; takes what is called when it fails


class Supervisor:
    """An `EngineClient` over one engine after the other. Make one with `start`, end it with `shutdown`."""

    def __init__(
        self,
        engine: Mortal,
        start: Start,
        limits: RestartLimits,
        *,
        load_s: float,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._start = start
        self._limits = limits
        self._load_s = load_s
        self._on_failure = on_failure
        self._requests: dict[str, Continuation] = {}
        self._totals = EngineStats()  # of engines that have died
        self._restarting: asyncio.Task[None] | None = None
        self._restarting_since_s = 0.0
        self._is_closing = False
        self._end = ""  # why no engine will come any more

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        max_restarts: int = MAX_PER_HOUR,
        timeout_s: float = TIMEOUT_S,
        on_progress: Progress | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> Supervisor:
        """Start the first engine and return once it is ready.

        It is started again at most `max_restarts` times within an hour. `on_failure` is called when it dies for good;
        `timeout_s` is that of `ProcessEngine.start`, which also says what this raises.
        """

        def note_death() -> None:
            if supervisor is not None:  # else the start raises
                supervisor.note_death()

        supervisor: Supervisor | None = None
        begun_s = time.monotonic()
        engine = await ProcessEngine.start(config, timeout_s=timeout_s, on_progress=on_progress, on_failure=note_death)
        supervisor = cls(
            engine,
            partial(_start_process, config, timeout_s),
            RestartLimits(max_restarts),
            load_s=time.monotonic() - begun_s,
            on_failure=on_failure,
        )
        return supervisor

    @property
    def model(self) -> ModelInfo:
        """What the engine serves."""
        return self._engine.model

    @property
    def state(self) -> EngineState:
        """See `EngineClient.state`. An engine that is gone has died a moment ago: it is noticed only once its last
        messages have been read.
        """
        if self._end:
            return EngineState.GONE
        if self._restarting is not None:
            return EngineState.RESTARTING
        state = self._engine.state
        return EngineState.RESTARTING if state is EngineState.GONE and not self._is_closing else state

    @property
    def back_in_s(self) -> float:
        """See `EngineClient.back_in_s`: as long as the last start took, less what has passed."""
        if self.state is not EngineState.RESTARTING:
            return 0.0
        passed_s = 0.0 if self._restarting is None else time.monotonic() - self._restarting_since_s
        return max(self._load_s - passed_s, 0.0)

    def stats(self) -> EngineStats:
        """Return the newest snapshot; totals are those of all engines together."""
        if self._restarting is None and not self._end:
            stats = _added(self._totals, self._engine.stats())
        else:
            stats = msgspec.structs.replace(self._totals, num_waiting=len(self._requests))
        return msgspec.structs.replace(stats, engine_restarts_total=self._limits.num_restarts)

    async def stream(self, submission: Submission) -> AsyncGenerator[TokenOutput, None]:
        """Submit and yield outputs; see `EngineClient.stream`. While an engine is started, wait for it."""
        if self._end:
            raise EngineError(self._end)
        request_id = submission.request_id
        request = self._requests[request_id] = Continuation(submission)
        try:
            if self._restarting is None:
                self._submit(request)
            is_last = False
            while not is_last:
                output = await request.outputs.get()
                if output is None:
                    raise EngineError(self._end)
                is_last = output.finish_reason is not None
                yield output
        finally:
            self._forget(request)
            if self._restarting is None and not request.is_finished:
                self._engine.abandon(request_id)

    def cancel(self, request_ids: list[str]) -> None:
        """Ask the engine to end these requests; while there is none, they end now."""
        if self._restarting is None:
            self._engine.cancel(request_ids)
            return
        for request_id in request_ids:
            if request_id in self._requests:
                self._requests.pop(request_id).cancel()

    async def shutdown(self, deadline_s: float) -> None:
        """Let running requests finish within the deadline, cancel the rest, end the process.

        An engine that is on its way is waited for, as far as the deadline allows: requests have to finish.
        """
        last_s = time.monotonic() + deadline_s
        if self._restarting is not None:
            await asyncio.wait((self._restarting,), timeout=deadline_s if self._requests else 0)
        self._is_closing = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
            self._restarting = None
        await self._engine.shutdown(max(last_s - time.monotonic(), 0.0))
        self._end = self._end or "the engine has been shut down"
        self._end_requests()

    def note_death(self) -> None:
        """The engine has failed. While it is being shut down, that is its end."""
        if not (self._is_closing or self._end) and self._restarting is None:
            self._restarting_since_s = time.monotonic()
            self._totals = _totals(_added(self._totals, self._engine.stats()))
            self._restarting = asyncio.create_task(self._restart())

    def _submit(self, request: Continuation) -> None:
        self._engine.submit(request.rest(), partial(self._receive, request))

    def _receive(self, request: Continuation, output: TokenOutput | None) -> None:
        """Take what the engine reports of a request. Its end without the request's is a reported death."""
        if output is not None and request.receive(output):
            self._limits.note_progress()
            if request.is_finished:
                self._forget(request)

    def _forget(self, request: Continuation) -> None:
        self._requests.pop(request.submission.request_id, None)

    async def _restart(self) -> None:
        """Start an engine in the place of the one that died, and have it go on with all requests."""
        death = self._engine.death
        await self._engine.shutdown(0)
        self._fail_guilty(death)
        engine: Mortal | None = None
        while engine is None:
            refusal = self._limits.note_death(is_from_outside=death.is_from_outside)
            if refusal:
                self._give_up(f"the engine has died for good ({death.reason}): {refusal}")
                return
            await asyncio.sleep(self._limits.delay_s)
            begun_s = time.monotonic()
            try:
                engine = await self._start(self.note_death)
            except Exception as error:  # whatever it is: without an engine, nobody would ever get an answer
                death = Death(str(error), isinstance(error, EngineError) and error.is_from_outside)
        self._load_s = time.monotonic() - begun_s
        self._engine = engine
        self._restarting = None
        for request in sorted(self._requests.values(), key=lambda request: request.place):
            self._submit(request)
        took_s = time.monotonic() - self._restarting_since_s
        logger.warning("the engine is back after %.1f s and goes on with %d requests", took_s, len(self._requests))

    def _fail_guilty(self, death: Death) -> None:
        guilty = judge(death, self._requests)
        if guilty is None:
            return
        request_id = guilty.submission.request_id
        logger.error("request %s fails: the engine has died of it again (%s)", request_id, death.reason)
        self._requests.pop(request_id)
        guilty.fail(f"the engine process died of this request, and again when it was computed alone ({death.reason})")
        self._limits.note_progress()

    def _give_up(self, reason: str) -> None:
        logger.error("%s", reason)
        self._end = reason
        self._restarting = None
        self._end_requests()
        if self._on_failure is not None:
            self._on_failure()

    def _end_requests(self) -> None:
        for request in self._requests.values():
            request.outputs.put_nowait(None)
        self._requests.clear()


async def _start_process(config: EngineConfig, timeout_s: float, on_failure: Callable[[], None]) -> Mortal:
    return await ProcessEngine.start(config, timeout_s=timeout_s, on_failure=on_failure)


def _added(totals: EngineStats, stats: EngineStats) -> EngineStats:
    """Return a snapshot with the totals of earlier engines added to its own."""
    sums = {name: getattr(totals, name) + getattr(stats, name) for name in _TOTALS}
    return msgspec.structs.replace(stats, **sums)


def _totals(stats: EngineStats) -> EngineStats:
    """Return what of a snapshot is true after its engine's death."""
    return EngineStats(**{name: getattr(stats, name) for name in _TOTALS})


_TOTALS = tuple(field.name for field in msgspec.structs.fields(EngineStats) if field.name.endswith("_total"))
