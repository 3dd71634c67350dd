"""An engine in a process of its own, seen from asyncio: `EngineClient` over msgspec. One process, one life.

One reader task hands outputs to the sinks they belong to, one watcher notices when the process dies, a third when it is
stuck. Whatever happens to the process, every stream ends; who wants them to go on in another uses a `Supervisor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from moeflow.core import errors
from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import (
    Cancellation,
    EngineStats,
    Failed,
    FromEngine,
    Loading,
    ModelInfo,
    Outputs,
    Ready,
    Seen,
    Shutdown,
    Stopped,
    Submission,
    ToEngine,
    TokenOutput,
)
from moeflow.core.errors import EngineError, MoeflowError
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.processes.deaths import Death
from moeflow.processes.engine_host import EngineHost, LocalHost
from moeflow.processes.open_looks import OpenLooks
from moeflow.processes.sinks import Sink, Sinks
from moeflow.processes.stall import TIMEOUT_S, StallWatch, foreseen_pass_s

if TYPE_CHECKING:
    from moeflow.core.observation import Question, Sight

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 5.0  # how long a process may take to leave after its work is done
WATCH_S = 0.5  # how often it is looked whether the process is stuck
MAX_TICK_S = 2.0  # a longer pause is this process's own, or the whole machine's

Progress = Callable[[int, int], None]
Launch = Callable[[int], Awaitable[EngineHost]]  # starts a process for so many sequences at once


class ProcessEngine:
    """A running engine process. Make one with `start`, end it with `shutdown`."""

    def __init__(
        self,
        host: EngineHost,
        stall: StallWatch,
        *,
        on_progress: Progress | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._loaded_share = ""
        self._host = host
        self._stall = stall
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._sinks = Sinks()
        self._looks = OpenLooks(self._send)
        self._model: ModelInfo | None = None
        self._stats = EngineStats()
        self._failure: MoeflowError | None = None
        self._death: Death | None = None
        self._overdue: Death | None = None  # set when it is ended for being stuck
        self._problem = ""  # why it is taken to be stuck
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._on_change: Callable[[], None] | None = None
        self._ready = asyncio.Event()  # loaded, or failed to
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._watch(), self._watch_for_stalls())]

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        launch: Launch = LocalHost.launch,
        timeout_s: float = TIMEOUT_S,
        on_begun: Callable[[ProcessEngine], None] | None = None,
        on_progress: Progress | None = None,
        on_failure: Callable[[], None] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> ProcessEngine:
        """Start a process by `launch`, load the model, and return once it is ready.

        A process that stops running, or a pass that does not end, is ended after `timeout_s`, or later if passes are
        that long; 0: never. `on_failure` is called if it fails after the start, `on_change` after each pass and each
        look at whether it is stuck. `on_begun` gets the engine before it loads.

        Raises: the error that kept the engine from loading (CheckpointError, CapacityError, ...), or EngineError;
        ConfigError if there is no place for the socket.
        """
        host = await launch(config.scheduler.max_num_seqs)
        engine = cls(host, StallWatch(timeout_s), on_progress=on_progress, on_failure=on_failure)
        if on_begun is not None:
            on_begun(engine)
        try:
            host.send(msgspec.msgpack.encode(config))  # goes out once the process connects, if it ever does
            await engine._ready.wait()
        except BaseException:
            await engine._kill()
            raise
        if engine._failure is not None:
            await engine._kill()
            raise engine._failure
        engine._stall.foreseen_s = foreseen_pass_s(config, engine.model)
        engine._on_change = on_change
        return engine

    @property
    def model(self) -> ModelInfo:
        """What the engine serves."""
        assert self._model is not None, "start() returns only once the model is known"
        return self._model

    @property
    def host(self) -> str:
        """Name of the machine that computes; empty: this one."""
        return self._host.name

    @property
    def activity(self) -> str:
        """Progress of the start; empty: unknown, or it is over."""
        return "" if self._ready.is_set() else self._host.activity or self._loaded_share

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and has not failed."""
        return self._failure is None and self._host.is_running

    @property
    def state(self) -> EngineState:
        """See `EngineClient.state`."""
        if not self.is_alive:
            return EngineState.GONE
        if self._problem:
            return EngineState.STALLED
        return EngineState.DRAINING if self._host.is_leaving else EngineState.READY

    @property
    def back_in_s(self) -> float:
        """See `EngineClient.back_in_s`: one that has ended does not come back."""
        return 0.0

    @property
    def death(self) -> Death:
        """How it failed."""
        assert self._death is not None, "asked of an engine that has failed"
        return self._death

    @property
    def pass_s(self) -> float:
        """How long no pass has ended, though there is work."""
        return self._stall.pass_s

    @property
    def longest_pass_s(self) -> float:
        """How long its longest pass has taken, as far as is known."""
        return self._stall.longest_pass_s

    def stats(self) -> EngineStats:
        """Return the newest snapshot the engine has sent."""
        return msgspec.structs.replace(self._stats, is_engine_stalled=True) if self._problem else self._stats

    def replicas(self) -> list[ReplicaStatus]:
        """See `EngineClient.replicas`."""
        return [ReplicaStatus(self.state, self.stats(), host=self.host)]

    async def ask(self, question: Question) -> Sight | None:
        """Return the engine's answer; None: it loads, does not answer in time, or cannot. See `EngineClient.look`."""
        if self.state not in (EngineState.READY, EngineState.DRAINING) or not self._ready.is_set():
            return None
        return await self._looks.ask(question)

    async def look(self, question: Question) -> dict[int, Sight]:
        """See `EngineClient.look`."""
        sight = await self.ask(question)
        return {} if sight is None else {0: sight}

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Submit a request; `sink` gets its outputs as they arrive, or None if the engine ends before it."""
        self._sinks.add(submission.request_id, sink)
        self._send(submission)

    async def stream(self, submission: Submission) -> AsyncGenerator[TokenOutput, None]:
        """Submit and yield outputs; see `EngineClient.stream`."""
        self._check_alive()
        queue: asyncio.Queue[TokenOutput | None] = asyncio.Queue()
        finished = False
        try:
            self.submit(submission, queue.put_nowait)
            while not finished:
                output = await queue.get()
                if output is None:
                    finished = True
                    self._check_alive()
                    raise EngineError("the engine has been shut down")
                finished = output.finish_reason is not None
                yield output
        finally:
            if not finished:
                self.abandon(submission.request_id)

    def abandon(self, request_id: str) -> None:
        """Cancel a request without a reader."""
        if self._sinks.abandon(request_id) and self.is_alive:
            self._send(Cancellation([request_id]))

    async def shutdown(self, deadline_s: float) -> None:
        """Let running requests finish within the deadline, cancel the rest, end the process."""
        if self.is_alive:
            self._send(Shutdown(deadline_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._host.wait(), deadline_s + EXIT_GRACE_S)
        await self._kill()

    def _send(self, message: ToEngine) -> None:
        self._host.send(self._encoder.encode(message))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(str(self._failure))
        if not self._host.is_running:
            raise EngineError("the engine process has ended")

    async def _read(self) -> None:
        try:
            while True:
                message = self._decoder.decode(await self._host.receive())
                self._stall.note_message()
                self._take(message)
        except Exception as error:  # without a reader no stream would ever end
            logger.exception("a message of the engine cannot be taken in")
            self._fail(EngineError(f"a message of the engine cannot be taken in: {error}"))

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._stats = message.stats
            for output in message.outputs:
                self._sinks.hand_out(output)
            self._note_change()
        elif isinstance(message, Loading):
            self._loaded_share = f"loading: {100 * message.bytes_done // max(message.bytes_total, 1)}%"
            if self._on_progress is not None:
                self._on_progress(message.bytes_done, message.bytes_total)
        elif isinstance(message, Seen):
            self._looks.take(message)
        elif isinstance(message, Ready):
            self._model, self._stats = message.model, message.stats
            self._ready.set()
        elif isinstance(message, Failed):
            self._fail(_rebuild(message), Death(message.message, is_from_outside=message.is_from_outside))
        elif isinstance(message, Stopped):
            self._end()

    async def _watch(self) -> None:
        death = await self._host.wait()
        if death is None and not self._ready.is_set():
            death = Death("exit code 0")
        if death is not None and self._failure is None:
            death = self._overdue or death
            message = f"the engine process died ({death.reason})"
            self._fail(EngineError(message, is_from_outside=death.is_from_outside), death)
        self._end()

    async def _watch_for_stalls(self) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = time.monotonic()
            elapsed_s, last_s = min(now_s - last_s, MAX_TICK_S), now_s
            beat, problem = self._host.look(), self._host.problem
            self._stall.tick(elapsed_s, beat, has_work=self._sinks.is_waiting, is_lost=bool(problem))
            self._note_problem(problem or self._stall.problem)
            self._note_change()
            if self._host.is_leaving and not self._ready.is_set():
                self._host.kill()  # it may start on another machine
            if self._stall.is_overdue and self._host.is_running:
                reason = f"ended because it did not answer: {self._problem}"
                self._overdue = Death(reason, is_from_outside=bool(problem))
                self._host.kill()
                return

    def _note_problem(self, problem: str) -> None:
        if bool(problem) is not bool(self._problem):
            if problem:
                logger.error("engine stalled: %s", problem)
            else:
                logger.warning("engine no longer stalled")
        self._problem = problem

    def _fail(self, error: MoeflowError, death: Death | None = None) -> None:
        if self._failure is None:
            self._failure = error
            self._death = dataclasses.replace(death or Death(str(error)), in_pass=self._host.in_pass())
            if self._ready.is_set() and self._on_failure is not None:
                self._on_failure()
            else:
                logger.error("engine failure: %s", error)
        self._ready.set()
        self._end()

    def _end(self) -> None:
        """End all that waits for the engine."""
        self._sinks.end()
        self._looks.end()

    def _note_change(self) -> None:
        if self._on_change is not None:
            self._on_change()

    async def _kill(self) -> None:
        """Leave nothing behind: no process, no task."""
        self._host.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end()
        await self._host.close()


def _rebuild(message: Failed) -> MoeflowError:
    """Turn a reported failure back into an error, of its own class where callers tell those apart."""
    if message.kind in ("ConfigError", "CapacityError"):
        kind: type[MoeflowError] = getattr(errors, message.kind)
        return kind(message.message)
    if hasattr(errors, message.kind):
        return EngineError(message.message, is_from_outside=message.is_from_outside)
    return EngineError(f"{message.kind}: {message.message}")
