"""The place of one engine's process, and the channel to it: on this machine here, elsewhere in `processes/nodes`.

`ProcessEngine` sends and receives bytes through it, and asks it for signs of life. One host serves one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Protocol

import zmq
import zmq.asyncio

from moeflow.parallel.process_watch import ProcessWatch
from moeflow.processes.deaths import Death, OomKills, name_death
from moeflow.processes.pass_record import PassRecord, make_descriptor
from moeflow.processes.socket_folder import SocketFolder

STOPPED_S = 1.0  # after which a stopped process is a problem
LAST_WORDS_S = 0.1  # messages that a dead process has sent may still be in the socket


class EngineHost(Protocol):
    """Where an engine's process runs."""

    @property
    def name(self) -> str:
        """Name of its machine; empty: this one."""

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended, as far as is known."""

    @property
    def problem(self) -> str:
        """Why its machine does not answer, or its process is stopped; empty: neither is known."""

    @property
    def activity(self) -> str:
        """Progress of the host before the process starts; empty: nothing to report."""

    @property
    def is_leaving(self) -> bool:
        """Whether its machine is about to go: the engine is to end once its requests are elsewhere."""

    def send(self, message: bytes) -> None:
        """Send a message. Never waits."""

    async def receive(self) -> bytes:
        """Return the next message of the process."""

    def look(self) -> int:
        """Return the process's newest heartbeat; 0: there is none yet. Call regularly."""

    def in_pass(self) -> Mapping[str, int]:
        """Return requests of the pass under way, or of a dead process's last one, with their output tokens."""

    async def wait(self) -> Death | None:
        """Return how the process has ended, once it has; None: without an error."""

    def kill(self) -> None:
        """End the process."""

    async def close(self) -> None:
        """Leave nothing behind: no process, no socket."""


class LocalHost:
    """A child process of this one."""

    is_leaving = False  # it stays as long as this process
    activity = ""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        socket: zmq.asyncio.Socket,
        folder: SocketFolder,
        record: PassRecord,
    ) -> None:
        self.process = process
        self._socket = socket
        self._folder = folder
        self._record = record
        self._watch = ProcessWatch(process.pid)
        self._oom_kills = OomKills.read()

    @classmethod
    async def launch(cls, max_num_seqs: int) -> LocalHost:
        """Start a process that has nothing to do yet. Raises: ConfigError if there is no place for the socket."""
        with contextlib.ExitStack() as undo:
            folder = SocketFolder()
            undo.callback(folder.remove)
            descriptor = make_descriptor(max_num_seqs)
            undo.callback(os.close, descriptor)
            socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
            undo.callback(socket.close, linger=0)
            socket.set_hwm(0)
            try:
                socket.bind(folder.address)
            except zmq.ZMQError as error:
                raise folder.unusable(error.strerror) from None
            # A session of its own: Ctrl-C in the terminal reaches this process only, which then ends the engine.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "moeflow.processes.main", folder.address, str(os.getpid()), str(descriptor)),
                pass_fds=(descriptor,),
                start_new_session=True,
            )
            undo.pop_all()
        return cls(process, socket, folder, PassRecord(descriptor))

    @property
    def name(self) -> str:
        """See `EngineHost`."""
        return ""

    @property
    def is_running(self) -> bool:
        """See `EngineHost`."""
        return self.process.returncode is None

    @property
    def problem(self) -> str:
        """See `EngineHost`."""
        stopped_s = self._watch.stopped_s
        return f"process {self.process.pid} has been stopped for {stopped_s:.0f} s" if stopped_s >= STOPPED_S else ""

    def send(self, message: bytes) -> None:
        """See `EngineHost`."""
        # The queue has no limit, so sending never waits; the future is done or will be without us.
        self._socket.send(message)

    async def receive(self) -> bytes:
        """See `EngineHost`."""
        message: bytes = await self._socket.recv()
        return message

    def look(self) -> int:
        """See `EngineHost`. Also reads the kernel's counters, so that others' deaths are not taken for this one's."""
        if self.is_running:
            self._oom_kills = OomKills.read()
            self._watch.look()
        return self._record.beat

    def in_pass(self) -> Mapping[str, int]:
        """See `EngineHost`."""
        return self._record.in_pass()

    async def wait(self) -> Death | None:
        """See `EngineHost`. Its last messages have arrived by then."""
        code = await self.process.wait()
        if code == 0:
            return None
        await asyncio.sleep(LAST_WORDS_S)
        death = name_death(code, self._oom_kills, OomKills.read())
        return dataclasses.replace(death, reason=f"process {self.process.pid}: {death.reason}")

    def kill(self) -> None:
        """See `EngineHost`."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def close(self) -> None:
        """See `EngineHost`."""
        self.kill()
        await self.process.wait()
        self._socket.close(linger=0)
        self._folder.remove()
        self._record.close()
