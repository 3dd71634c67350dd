"""An engine in a child process, seen from asyncio: `EngineClient` over ZeroMQ and msgspec.

One reader task hands outputs to the streams they belong to, one watcher notices when the process dies.
Whatever happens to the process, every stream ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable

import msgspec
import zmq
import zmq.asyncio

from moeflow.core import errors
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import ConfigError, EngineError, MoeflowError
from moeflow.engine.messages import (
    Cancellation,
    EngineStats,
    Failed,
    FromEngine,
    Loading,
    ModelInfo,
    Outputs,
    Ready,
    Shutdown,
    Stopped,
    Submission,
    ToEngine,
    TokenOutput,
)
from moeflow.engine.socket_folder import SocketFolder

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 5.0  # how long a process may take to leave after its work is done
_MEANINGS = {signal.SIGKILL: ", as when memory runs out", signal.SIGBUS: ", as when a file in use is cut"}

Progress = Callable[[int, int], None]


class ProcessEngine:
    """A running engine process. Make one with `start`, end it with `shutdown`."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: SocketFolder) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._streams: dict[str, asyncio.Queue[TokenOutput | None]] = {}
        self._model: ModelInfo | None = None
        self._stats = EngineStats()
        self._failure: MoeflowError | None = None
        self._on_progress: Progress | None = None
        self._on_failure: Callable[[], None] | None = None
        self._ready = asyncio.Event()  # loaded, or failed to
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        on_progress: Progress | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> ProcessEngine:
        """Start a process, load the model, and return once it is ready.

        `on_failure` is called if it fails after that.

        Raises: the error that kept the engine from loading (CheckpointError, CapacityError, ...), or EngineError;
        ConfigError if there is no place for the socket.
        """
        folder = SocketFolder()
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set_hwm(0)
        try:
            socket.bind(folder.address)
            # A session of its own: Ctrl-C in the terminal reaches this process only, which then ends the engine.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "moeflow.engine.process", folder.address, str(os.getpid()), start_new_session=True
            )
        except BaseException as error:
            socket.close(linger=0)
            folder.remove()
            if isinstance(error, zmq.ZMQError):
                remedy = "let TMPDIR name a folder of your own with a short path"
                raise ConfigError(f"cannot make a socket in {folder.path}: {error.strerror}; {remedy}") from None
            raise
        engine = cls(process, socket, folder)
        engine._on_progress = on_progress
        engine._on_failure = on_failure
        try:
            socket.send(msgspec.msgpack.encode(config))  # goes out once the process connects, if it ever does
            await engine._ready.wait()
        except BaseException:
            await engine._kill()
            raise
        if engine._failure is not None:
            await engine._kill()
            raise engine._failure
        return engine

    @property
    def model(self) -> ModelInfo:
        """What the engine serves."""
        assert self._model is not None, "start() returns only once the model is known"
        return self._model

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and has not failed."""
        return self._failure is None and self._process.returncode is None

    def stats(self) -> EngineStats:
        """Return the newest snapshot the engine has sent."""
        return self._stats

    async def stream(self, submission: Submission) -> AsyncGenerator[TokenOutput, None]:
        """Submit and yield outputs; see `EngineClient.stream`."""
        self._check_alive()
        queue = self._streams[submission.request_id] = asyncio.Queue()
        finished = False
        try:
            self._send(submission)
            while not finished:
                output = await queue.get()
                if output is None:
                    finished = True
                    self._check_alive()
                    raise EngineError("the engine has been shut down")
                finished = output.finish_reason is not None
                yield output
        finally:
            del self._streams[submission.request_id]
            if not finished:
                self.cancel([submission.request_id])

    def cancel(self, request_ids: list[str]) -> None:
        """Ask the engine to end these requests."""
        if self.is_alive:
            self._send(Cancellation(request_ids))

    async def shutdown(self, deadline_s: float) -> None:
        """Let running requests finish within the deadline, cancel the rest, end the process."""
        if self.is_alive:
            self._send(Shutdown(deadline_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), deadline_s + EXIT_GRACE_S)
        await self._kill()

    def _send(self, message: ToEngine) -> None:
        # The queue has no limit, so sending never waits; the future is done or will be without us.
        self._socket.send(self._encoder.encode(message))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(str(self._failure))
        if self._process.returncode is not None:
            raise EngineError("the engine process has ended")

    async def _read(self) -> None:
        try:
            while True:
                message = self._decoder.decode(await self._socket.recv())
                self._take(message)
        except Exception as error:  # without a reader no stream would ever end
            logger.exception("a message of the engine cannot be taken in")
            self._fail(EngineError(f"a message of the engine cannot be taken in: {error}"))

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._stats = message.stats
            for output in message.outputs:
                if output.request_id in self._streams:
                    self._streams[output.request_id].put_nowait(output)
        elif isinstance(message, Loading):
            if self._on_progress is not None:
                self._on_progress(message.bytes_done, message.bytes_total)
        elif isinstance(message, Ready):
            self._model, self._stats = message.model, message.stats
            self._ready.set()
        elif isinstance(message, Failed):
            self._fail(_rebuild(message))
        elif isinstance(message, Stopped):
            self._end_streams()

    async def _watch(self) -> None:
        code = await self._process.wait()
        if (code != 0 or not self._ready.is_set()) and self._failure is None:
            await asyncio.sleep(0.1)  # its last words may still be in the socket, and say more
            self._fail(EngineError(f"the engine process died ({_cause(code)})"))
        self._end_streams()

    def _fail(self, error: MoeflowError) -> None:
        if self._failure is None:
            logger.error("engine failure: %s", error)
            self._failure = error
            if self._ready.is_set() and self._on_failure is not None:
                self._on_failure()
        self._ready.set()
        self._end_streams()

    def _end_streams(self) -> None:
        for queue in self._streams.values():
            queue.put_nowait(None)

    async def _kill(self) -> None:
        """Leave nothing behind: no process, no task, no socket, no folder."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_streams()
        self._socket.close(linger=0)
        self._folder.remove()


def _cause(code: int) -> str:
    """Say what a process's exit code means."""
    if code >= 0:
        return f"exit code {code}"
    number = signal.Signals(-code)
    return number.name + _MEANINGS.get(number, "")


def _rebuild(message: Failed) -> MoeflowError:
    """Turn a reported failure back into an error, of its own class where callers tell those apart."""
    if message.kind in ("ConfigError", "CapacityError"):
        kind: type[MoeflowError] = getattr(errors, message.kind)
        return kind(message.message)
    if hasattr(errors, message.kind):
        return EngineError(message.message)
    return EngineError(f"{message.kind}: {message.message}")
