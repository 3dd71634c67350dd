"""The engine in a process of its own: a slow client, a burst of parsing or a crash of the API never stalls a pass, and
vice versa.

Run as `python -m moeflow.processes.main ADDRESS PARENT_PID RECORD`; the parent sends an `EngineConfig`, then
`ToEngine` messages, and gets `FromEngine` messages back over one ZeroMQ pair. RECORD is the descriptor of a
`PassRecord`, which shows what the process was doing if it dies. It ends on `Shutdown`, or at once when its parent is
gone.
"""

from __future__ import annotations

import gc
import logging
import math
import signal
import sys
import time
from contextlib import closing
from typing import NoReturn

import msgspec
import zmq

from moeflow.core.batch import Batch
from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import (
    Cancellation,
    Failed,
    FromEngine,
    Loading,
    Look,
    Outputs,
    Ready,
    Seen,
    Shutdown,
    Stopped,
    Submission,
    ToEngine,
    TokenOutput,
)
from moeflow.core.errors import EngineError, GroupError, MoeflowError, RequestError
from moeflow.core.request import FinishReason
from moeflow.engine.engine import Engine
from moeflow.kernels.on_demand import on_demand
from moeflow.processes.deaths import OomKills, name_death
from moeflow.processes.lifeline import OrphanedError, tie_to_parent
from moeflow.processes.pass_record import PassRecord

with on_demand(__name__):
    from moeflow.core import observation
    from moeflow.engine.ranks import linked_rank

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 1000  # how often an engine without work looks whether memory can be given back, and ranks are there


class EngineProcess:
    """Feeds one engine from a socket."""

    def __init__(self, socket: zmq.Socket[bytes], record: PassRecord) -> None:
        self._socket = socket
        self._record = record
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._refused: list[TokenOutput] = []
        self._oom_kills = OomKills.read()  # so far
        self._deadline: float | None = None  # set once shutdown is asked for

    def run(self) -> None:
        """Load, serve until shutdown, confirm it. Failures are reported before they end the process."""
        try:
            config = msgspec.msgpack.decode(self._socket.recv(), type=EngineConfig)
            if config.parallel is not None and config.parallel.links is not None and config.parallel.links.rank:
                linked_rank.compute_linked(config)
                return
            with closing(Engine.load(config, self._send_progress, self._note_pass)) as engine:
                gc.freeze()  # loaded objects stay: searching them for garbage would delay passes and the end
                self._send(Ready(model=engine.model, stats=engine.stats()))
                self._serve(engine)
            self._send(Stopped())
        except GroupError as error:
            if error.__cause__ is not None:  # our own mistake; a lost rank is reported by the supervisor
                logger.error("the engine ends: %s", error, exc_info=error.__cause__)
            if error.signal_number:
                death = name_death(-error.signal_number, self._oom_kills, OomKills.read())
                error = GroupError(f"{error}: {death.reason}", is_from_outside=death.is_from_outside)
            self._fail(error)
        except MoeflowError as error:  # the supervisor logs it
            self._fail(error)
        except Exception as error:
            logger.exception("the engine ends")
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        """Report what ends the process, and end it."""
        is_from_outside = isinstance(error, EngineError) and error.is_from_outside
        self._send(Failed(type(error).__name__, str(error), is_from_outside))
        raise SystemExit(1) from None

    def _serve(self, engine: Engine) -> None:
        while self._deadline is None or engine.has_work:
            busy = engine.has_work or bool(self._refused)
            if not busy:
                self._oom_kills = OomKills.read()
            held_ms = 0 if self._refused else math.ceil(engine.held_s * 1000)
            self._receive(engine, timeout_ms=held_ms if busy else IDLE_POLL_MS)
            if self._deadline is not None and time.monotonic() > self._deadline:
                engine.cancel_all()
            had_work = engine.has_work
            outputs = engine.step()
            self._record.end()
            outputs += self._refused
            self._refused = []
            if outputs or had_work:  # a chunk of a prompt brings no output, but fresh statistics
                self._send(Outputs(outputs, engine.stats()))
            if had_work and not engine.has_work:
                engine.load_ahead()

    def _receive(self, engine: Engine, timeout_ms: int) -> None:
        """Take in whatever has arrived; wait for the first message at most `timeout_ms`."""
        while self._socket.poll(timeout_ms):
            timeout_ms = 0
            message = self._decoder.decode(self._socket.recv())
            if isinstance(message, Submission):
                self._submit(engine, message)
            elif isinstance(message, Cancellation):
                engine.cancel(message.request_ids)
            elif isinstance(message, Shutdown):
                self._deadline = time.monotonic() + message.deadline_s
            elif isinstance(message, Look):
                self._send(_seen(engine, message))

    def _send_progress(self, bytes_done: int, bytes_total: int) -> None:
        self._send(Loading(bytes_done, bytes_total))

    def _note_pass(self, batch: Batch) -> None:
        requests = (entry.request for entry in batch.entries)
        self._record.begin({request.request_id: len(request.output_token_ids) for request in requests})

    def _submit(self, engine: Engine, submission: Submission) -> None:
        try:
            if self._deadline is not None:
                raise RequestError("the engine is shutting down")
            engine.submit(submission)
        except RequestError as error:
            refusal = TokenOutput(request_id=submission.request_id, finish_reason=FinishReason.ERROR, error=str(error))
            self._refused.append(refusal)

    def _send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))


def _seen(engine: Engine, look: Look) -> Seen:
    """Answer a question. An error in it must not end the requests of the engine."""
    try:
        sight = engine.look(msgspec.msgpack.decode(look.question, type=observation.Question))
    except Exception as error:
        logger.exception("a question about passes cannot be answered")
        return Seen(look.number, error=f"{type(error).__name__}: {error}")
    return Seen(look.number, msgspec.msgpack.encode(sight))


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    record = PassRecord(int(sys.argv[3]))
    try:
        tie_to_parent(int(sys.argv[2]), record)
    except OrphanedError as error:
        logger.warning("%s; stopping", error)
        return
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # messages are small and the parent always reads: never block a pass on it
    socket.connect(sys.argv[1])
    try:
        EngineProcess(socket, record).run()
    finally:
        socket.close(linger=2000)  # the last words must get out
        context.term()


if __name__ == "__main__":
    main()
