"""The processes of a server on this machine, by role. Only processes of the same user are touched."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from moeflow.core.errors import ConfigError

_MODULES = {  # of the command lines of children
    "moeflow.processes.main": "engine",
    "moeflow.engine.ranks.main": "rank",
    "moeflow.text.template_process": "template",
    "moeflow.engine.constraints.check_process": "grammar",
}
Undo = contextlib.ExitStack


def role_of(process: psutil.Process) -> str:
    """Return the role of a process in a deployment; empty: none."""
    try:
        words = process.cmdline()
        if process.status() == psutil.STATUS_ZOMBIE or process.uids().real != os.getuid():
            return ""
    except psutil.Error:
        return ""
    for word in words:
        if word in _MODULES:
            return _MODULES[word]
    return "keeper" if "join" in words and any("moeflow" in word for word in words) else ""


@dataclass(frozen=True, slots=True)
class Processes:
    """A server's process, its children, and processes that have joined."""

    server: psutil.Process
    joined: Callable[[], Sequence[psutil.Process]] = tuple

    def all(self) -> Iterator[tuple[str, psutil.Process]]:
        """Yield every process with its role, but the server's own."""
        for root in (self.server, *self.joined()):
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (root, *root.children(recursive=True)):
                    if role := role_of(process):
                        yield role, process

    def of(self, *roles: str) -> list[psutil.Process]:
        """Return the processes of some roles, oldest first."""
        found = {process for role, process in self.all() if role in roles}
        return sorted(found, key=lambda process: (process.create_time(), process.pid))


def find_processes(port: int) -> Processes:
    """Return the processes of the server that listens at a port. Raises: ConfigError if it is none of this user's."""
    listeners = [it.pid for it in psutil.net_connections("tcp") if it.status == "LISTEN" and it.laddr.port == port]
    servers = [psutil.Process(pid) for pid in listeners if pid]
    server = next((it for it in servers if any(map(role_of, it.children()))), None)
    if server is None or server.uids().real != os.getuid():
        found = ", ".join(" ".join(it.cmdline()[:3]) for it in servers) or "no process of yours"
        raise ConfigError(
            f"{found} listens at port {port}, not `moeflow serve`: start a test server as this user, on this machine"
        )
    return Processes(server, lambda: _joined(server))


def _joined(server: psutil.Process) -> list[psutil.Process]:
    """Return processes of `moeflow join` with a connection to a server's port."""
    own = {server.pid, *(child.pid for child in server.children(recursive=True))}
    connections = psutil.net_connections("tcp")
    ports = {it.laddr.port for it in connections if it.pid in own and it.status == "LISTEN"}
    pids = {it.pid for it in connections if it.pid and it.raddr and it.raddr.port in ports and it.pid not in own}
    return [it for pid in pids if psutil.pid_exists(pid) and role_of(it := psutil.Process(pid)) == "keeper"]


def kill(process: psutil.Process) -> None:
    """Kill a process that may have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def stop(process: psutil.Process, undo: Undo) -> None:
    """Stop a process until the block ends."""
    undo.callback(_resume, process)
    process.suspend()


def limit(process: psutil.Process, kind: int, amount: int, undo: Undo) -> None:
    """Lower a limit of a process until the block ends."""
    before = resource.prlimit(process.pid, kind)
    undo.callback(_restore_limit, process, kind, before)
    resource.prlimit(process.pid, kind, (amount, before[1]))


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def _restore_limit(process: psutil.Process, kind: int, before: tuple[int, int]) -> None:
    if process.is_running():
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, kind, before)
