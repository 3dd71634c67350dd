"""The faults: each acts on processes or connections of a test deployment, and is undone in the end."""

from __future__ import annotations

import random
import resource
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psutil

from moeflow.cli.chaos.processes import Processes, Undo, kill, limit, stop
from moeflow.cli.chaos.proxy import Proxy
from moeflow.core.errors import ConfigError
from moeflow.core.near_names import did_you_mean

STALL_SEEN_S = 12.0  # a stop of this length must be visible in `/health`
_NUM_SLOW = 16  # clients that only disturb
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@dataclass(slots=True)
class Scene:
    """What faults act on. `undo` ends a fault."""

    processes: Processes
    front: Proxy  # half of the clients connect through it
    port: int
    rng: random.Random
    network: Proxy | None = None  # between the server and processes that have joined
    undo: Undo = field(default_factory=Undo)
    done: str = ""  # the target of the latest fault

    def choose(self, role: str) -> psutil.Process:
        """Return a random process of a role."""
        chosen = self.rng.choice(self.processes.of(role))
        self.done = f"{role} {chosen.pid}"
        return chosen


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    name: str
    begin: Callable[[Scene], None]
    needs: str = ""  # a role of a process; empty: none
    lasts: bool = False  # has an end of its own
    seen_from_s: float | None = None  # how long it must last for `/health` to show it; None: it need not
    cuts_clients: bool = False  # streams through the proxy end early


def _kill(role: str) -> Callable[[Scene], None]:
    return lambda scene: kill(scene.choose(role))


def _stop(role: str) -> Callable[[Scene], None]:
    return lambda scene: stop(scene.choose(role), scene.undo)


def _kill_node(scene: Scene) -> None:
    """Kill a keeper and all its processes, as the loss of a machine does."""
    keeper = scene.choose("keeper")
    for process in (keeper, *keeper.children(recursive=True)):
        kill(process)


def _cut_clients(scene: Scene) -> None:
    scene.front.reset()


def _slow_clients(scene: Scene) -> None:
    """Open connections that send half a request, that send nothing more, or that read nothing."""
    body = b'{"prompt": "slow", "max_tokens": 64, "stream": true}'
    whole = _HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for number in range(_NUM_SLOW):
        client = scene.undo.enter_context(socket.create_connection(("127.0.0.1", scene.port), 10.0))
        client.sendall(_HEAD if number % 2 else whole)
        if number % 4 == 0:
            client.shutdown(socket.SHUT_WR)


def _cut_network(scene: Scene) -> None:
    assert scene.network is not None
    scene.network.reset()


def _silence_network(scene: Scene) -> None:
    assert scene.network is not None
    scene.undo.callback(scene.network.mend)
    scene.network.cut()


def _fill_disk(scene: Scene) -> None:
    """Let no process write to a file: a limit stands for a full disk, so that no other program lacks space."""
    for process in (scene.processes.server, *(process for _, process in scene.processes.all())):
        limit(process, resource.RLIMIT_FSIZE, 0, scene.undo)


def _fill_memory(scene: Scene) -> None:
    """Let no engine get more memory."""
    for engine in scene.processes.of("engine"):
        limit(engine, resource.RLIMIT_AS, engine.memory_info().vms, scene.undo)


def _fill_descriptors(scene: Scene) -> None:
    """Let the server open nothing more."""
    server = scene.processes.server
    limit(server, resource.RLIMIT_NOFILE, server.num_fds(), scene.undo)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("engine-killed", _kill("engine"), "engine", seen_from_s=0.0),
        Fault("engine-stopped", _stop("engine"), "engine", lasts=True, seen_from_s=STALL_SEEN_S),
        Fault("rank-killed", _kill("rank"), "rank", seen_from_s=0.0),
        Fault("rank-stopped", _stop("rank"), "rank", lasts=True, seen_from_s=STALL_SEEN_S),
        Fault("keeper-killed", _kill("keeper"), "keeper", seen_from_s=0.0),
        Fault("keeper-stopped", _stop("keeper"), "keeper", lasts=True, seen_from_s=STALL_SEEN_S),
        Fault("node-killed", _kill_node, "keeper", seen_from_s=0.0),
        Fault("template-killed", _kill("template"), "template"),
        Fault("grammar-killed", _kill("grammar"), "grammar"),
        Fault("network-cut", _cut_network, "network"),
        Fault("network-silent", _silence_network, "network", lasts=True, seen_from_s=STALL_SEEN_S),
        Fault("clients-cut", _cut_clients, cuts_clients=True),
        Fault("clients-slow", _slow_clients, lasts=True),
        Fault("disk-full", _fill_disk, lasts=True),
        Fault("memory-full", _fill_memory, "engine", lasts=True),
        Fault("files-full", _fill_descriptors, lasts=True),
    )
}
NAMES = ", ".join(FAULTS)
_ONLY_WITH_CLUSTER = ("keeper-killed", "node-killed", "network-cut", "network-silent")


def is_possible(fault: Fault, scene: Scene) -> bool:
    """Whether the deployment has the fault's target, and the tool can bring it back."""
    if fault.name in _ONLY_WITH_CLUSTER and scene.network is None:
        return False
    return fault.needs in ("", "network") or bool(scene.processes.of(fault.needs))


def choose_faults(names: Iterable[str], scene: Scene) -> list[Fault]:
    """Return the named faults, or all that are possible. Raises: ConfigError for an impossible one."""
    chosen = list(dict.fromkeys(names))
    for name in chosen:
        if name not in FAULTS:
            raise ConfigError(f"no fault {name!r}; {did_you_mean(name, FAULTS, f'there are {NAMES}')}")
        if not is_possible(FAULTS[name], scene):
            target = FAULTS[name].needs
            raise ConfigError(f"{name}: no {target} that the tool could bring back; leave it out, or use --cluster")
    return [FAULTS[name] for name in chosen] or [fault for fault in FAULTS.values() if is_possible(fault, scene)]
