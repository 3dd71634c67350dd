"""The fronts of a server: processes that answer HTTP before the same engines. Each is started again when it dies.

They accept connections from one listening socket. A dead front loses its connections; new ones go to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable

from moeflow.engine.client import EngineClient
from moeflow.parallel.process_watch import ProcessWatch
from moeflow.processes.pass_record import make_memory
from moeflow.processes.restart_limits import RestartLimits
from moeflow.processes.socket_folder import SocketFolder
from moeflow.processes.stall import LOST_S
from moeflow.server.fronts.desk import Desk
from moeflow.server.fronts.messages import Drain, FromFront, Link, Settings, Stop
from moeflow.server.guard.occupancy import Occupancy
from moeflow.server.logs import log_descriptor
from moeflow.server.service import FrontState, Service

logger = logging.getLogger(__name__)

_STATE_S = 0.2  # how often a change of the engines' state is looked for
_END_S = 8.0  # for answers of a front to get out
_MAX_UNREAD_BYTES = 64 << 20  # of messages to a front: one that reads nothing hangs
_COUNT_BYTES = 8
SERVER_PLACE = 0  # of the server itself among all processes that count sequences


class Fronts:
    """A server's fronts, while it runs them with `running`."""

    def __init__(self, number: int, model_path: str) -> None:
        """Nothing is started yet. `model_path` has the tokenizer. Raises: ConfigError if a socket has no place."""
        self._number = number
        self._model_path = model_path
        self._memory = make_memory((1 + number) * _COUNT_BYTES)
        self.occupancy = Occupancy.mapped(self._memory, SERVER_PLACE)
        self._folder = SocketFolder()
        self.server_socket = socket.socket(socket.AF_UNIX)  # for requests that fronts forward
        try:
            self.server_socket.bind(f"{self._folder.path}/http")
        except OSError as error:
            raise self._folder.unusable(str(error)) from None
        self._desks: dict[int, Desk] = {}
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._watches: dict[int, ProcessWatch] = {}
        self._is_draining = False
        self._started: set[int] = set()
        self._have_all_started = asyncio.Event()
        self._closing = asyncio.Event()
        self.failure = ""  # why a front does not come back

    @contextlib.asynccontextmanager
    async def running(
        self, listener: socket.socket, service: Service, on_failure: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Run them. `on_failure` is called when one has died for good."""
        self._listener, self._service, self._on_failure = listener, service, on_failure
        service.fronts = self.states
        keeping = [asyncio.create_task(self._keep(1 + number)) for number in range(self._number)]
        showing = asyncio.create_task(self._show_state())
        try:
            yield
        finally:
            self._closing.set()
            for desk in self._desks.values():
                desk.link.send(Stop())
            await asyncio.wait(keeping, timeout=_END_S)
            for task in (*keeping, showing):
                task.cancel()
            await asyncio.gather(*keeping, showing, return_exceptions=True)
            self.server_socket.close()
            os.close(self._memory)
            self._folder.remove()

    async def attach(self, client: EngineClient) -> None:
        """The model is loaded; return once all fronts take requests."""
        for desk in self._desks.values():
            desk.attach(client)
        await self._have_all_started.wait()

    def states(self) -> list[FrontState]:
        """Return how each of them is."""
        watches = {number: self._watches.get(number) for number in range(1, 1 + self._number)}
        return [
            FrontState(number, watch is not None and number in self._started, 0.0 if watch is None else watch.stopped_s)
            for number, watch in watches.items()
        ]

    def drain(self) -> None:
        """Have all refuse new requests, later fronts too."""
        self._is_draining = True
        for desk in self._desks.values():
            desk.link.send(Drain())

    def reload(self) -> None:
        """Have all read keys and certificate again."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGHUP)

    async def _show_state(self) -> None:
        """Show fronts the engines' state, and end the ones that hang: others get their new connections then."""
        while True:
            await asyncio.sleep(_STATE_S)
            for number, watch in self._watches.items():
                watch.look()
                if watch.stopped_s >= LOST_S or self._desks[number].link.num_unread_bytes > _MAX_UNREAD_BYTES:
                    self._kill(number)
            if self._service.loaded is not None:
                for desk in self._desks.values():
                    desk.show_state(self._service.loaded.client)

    async def _keep(self, number: int) -> None:
        """Run one front after the other."""
        limits = RestartLimits(self._service.config.max_engine_restarts)
        while not self._closing.is_set():
            try:
                code = await self._run(number, limits)
                reason = f"exit code {code}"
            except Exception as error:  # any: it is started again
                code, reason = 1, f"{type(error).__name__}: {error}"
            if self._closing.is_set():
                return
            logger.error("front %d has died (%s); its connections are lost", number, reason)
            if refusal := limits.note_death(is_from_outside=code < 0):
                self.failure = f"front {number} has died for good: {refusal}"
                self._have_all_started.set()
                self._on_failure()
                return
            await asyncio.sleep(limits.delay_s)

    async def _run(self, number: int, limits: RestartLimits) -> int:
        """Run one process, and return its exit code. Raises: OSError."""
        own, other = socket.socketpair()
        with other:
            descriptors = (other.fileno(), self._listener.fileno(), self._memory)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "moeflow.server.fronts.main", *map(str, descriptors)),
                pass_fds=descriptors,
                stderr=log_descriptor(),
            )
        self._processes[number] = process
        link: Link[FromFront] = await Link.open(own, FromFront)
        path = str(self.server_socket.getsockname())
        link.send(Settings(self._service.config, self._model_path, number, path))

        def note_work() -> None:
            limits.note_progress()
            self._started.add(number)
            if len(self._started) == self._number:
                self._have_all_started.set()

        desk = self._desks[number] = Desk(number, link, self._service, note_work)
        self._watches[number] = ProcessWatch(process.pid)
        if self._is_draining:
            link.send(Drain())
        if self._closing.is_set():
            link.send(Stop())
        try:
            await desk.serve()
            return await process.wait()
        finally:
            del self._desks[number], self._processes[number], self._watches[number]
            self._started.discard(number)
            self.occupancy.clear(number)
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    process.kill()

    def kill(self) -> None:
        """End all at once."""
        for number in self._processes:
            self._kill(number)

    def _kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._processes[number].kill()
