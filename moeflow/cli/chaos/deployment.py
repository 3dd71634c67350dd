"""Servers of a test, with the machines that join them as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from moeflow.cli.chaos.processes import Processes
from moeflow.cli.chaos.proxy import Proxy
from moeflow.core.errors import EngineError
from moeflow.parallel.tcp.cluster_token import ensure_token

EXIT_S = 60.0
_MOEFLOW = (sys.executable, "-m", "moeflow.cli.main")


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    url: str
    processes: Processes

    @property
    def process(self) -> psutil.Process:
        """The process that listens."""
        return self.processes.server

    @property
    def engine(self) -> psutil.Process:
        """The engine's process that runs now; of several, the oldest."""
        return self.processes.of("engine")[0]


@contextlib.contextmanager
def serving(model: str | None, *options: str) -> Iterator[Server]:
    """Run a fresh server. Raises: EngineError if it does not start, or ends with an error after SIGTERM."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*_MOEFLOW, "serve", *([model] if model else []), "--port", "0", "--data-dir", folder, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                address = re.search(r"http://\S+", process.stdout.readline() if process.stdout else "")
                if address is None:
                    raise EngineError(f"the server ended with {process.wait()} before it was ready")
                yield Server(address[0], Processes(psutil.Process(process.pid)))
                process.terminate()
                if process.wait(EXIT_S):
                    raise EngineError(f"the server ended with {process.returncode}")
            finally:
                process.kill()


class Nodes:
    """Machines that join a server: processes of `moeflow join`, which start again when they have ended."""

    def __init__(self, number: int, options: Sequence[str]) -> None:
        """Nothing runs yet. `options` are those of `moeflow join`."""
        self._port = free_port()
        self.network = Proxy(self._port)  # between them and the server
        self._command = (*_MOEFLOW, "join", f"127.0.0.1:{self.network.port}", *options)
        self._number = number
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        """Where the server is to wait for them."""
        return f"127.0.0.1:{self._port}"

    def restore(self) -> None:
        """Start as many as are missing."""
        self._processes = [process for process in self._processes if process.poll() is None]
        while len(self._processes) < self._number:  # in a session of its own: Ctrl-C must not end it first
            self._processes.append(subprocess.Popen(self._command, start_new_session=True))

    def running(self) -> list[psutil.Process]:
        """Return the running processes."""
        return [psutil.Process(process.pid) for process in self._processes if process.poll() is None]

    def close(self) -> None:
        """End all."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(EXIT_S / 4)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.network.close()


@contextlib.contextmanager
def cluster(model: str | None, num_replicas: int, num_ranks: int) -> Iterator[tuple[Server, Nodes]]:
    """Run a server, and replicas or ranks that join it. Raises: as `serving`."""
    with contextlib.ExitStack() as undo:
        token = Path(undo.enter_context(tempfile.TemporaryDirectory())) / "cluster-token"
        ensure_token(token)
        number = num_ranks - 1 if num_ranks > 1 else num_replicas
        threads = str(max((os.cpu_count() or 1) // max(num_replicas, num_ranks), 1))
        nodes = Nodes(number, ["--threads", threads, "--cluster-token-file", str(token)])
        undo.callback(nodes.close)
        nodes.restore()
        parts = ["--ranks", str(num_ranks)] if num_ranks > 1 else ["--replicas", str(num_replicas)]
        joining = ["--listen-ranks", nodes.address, "--cluster-token-file", str(token)]
        limits = ["--threads", threads, "--max-engine-restarts", "10000", "--log-level", "warning"]
        server = undo.enter_context(serving(model, *parts, *joining, *limits))
        yield Server(server.url, Processes(server.process, nodes.running)), nodes


def free_port() -> int:
    """Return a port of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
