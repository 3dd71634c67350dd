"""Has Ray start keepers on the nodes of its cluster, and start them again when they end. The only file that imports
Ray.

It runs in a process of its own, which Ray may end: it does so when the cluster's head is gone for long. Ray places an
actor for each keeper: for all ranks of an engine, or for none. The actor only runs the keeper's process,
which connects to the server like `moeflow join`. Results never pass through Ray.

These processes are no children of Ray's: Ray kills its workers' children when a node loses the cluster, but a keeper
continues until its engine ends (`orphan_watch.py`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any, Final

import msgspec
import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moeflow.core.address import parse_address
from moeflow.core.errors import CapacityError, ConfigError, MoeflowError
from moeflow.core.loopback import is_loopback_name
from moeflow.core.truncated_repr import truncated
from moeflow.processes.cluster.ray_messages import (
    Connect,
    Connected,
    KeeperEnd,
    KeeperMessage,
    KeeperNews,
    KeeperRefused,
    LaunchOrder,
    LaunchReport,
    More,
    NodeLost,
    Placed,
    Progress,
    Unplaced,
)

_CONNECT_S: Final = 5.0
_LOOK_S: Final = 0.5
_PATIENCE_S: Final = 2.0  # places that exist are found sooner
_FIRST_PAUSE_S: Final = 0.5  # before a keeper is started again; each pause twice as long as the one before
_MAX_PAUSE_S: Final = 30.0
_STEADY_S: Final = 60.0  # a keeper that has run so long begins with the first pause again
# The shell ends at once, which leaves the keeper's process to the system's first one. Descriptor 3 passes its standard
# input on, since shells give background processes none.
_DETACHED: Final = ("sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh")


def main() -> None:
    """Entry point of the process: ends its keepers, and itself, when its standard input does."""
    orders, reports = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Ray prints is no report
    launch = Launch(reports)
    try:
        _connect(msgspec.json.decode(orders.readline(), type=Connect).address)
        launch.report(Connected(ray.util.get_node_ip_address()))
        order = msgspec.json.decode(orders.readline(), type=LaunchOrder)
        launch.run(order, orders)
    except MoeflowError as error:
        launch.report(Unplaced(str(error), isinstance(error, CapacityError)))
        raise SystemExit(1) from None
    finally:
        launch.close()


class KeeperActor:
    """Runs one keeper's process on its node."""

    def node(self) -> tuple[str, str]:
        """Return the id and the address of its node."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def run(self, order: str) -> str:
        """Run the process of a `KeeperOrder` until it ends; return its `KeeperEnd`. Both are JSON."""
        command = (
            *_DETACHED,
            sys.executable,
            "-m",
            "moeflow.parallel.child_main",
            "moeflow.processes.cluster.ray_keeper",
        )
        shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert shell.stdin is not None
        assert shell.stdout is not None
        with shell.stdin, shell.stdout:
            shell.stdin.write(order.encode() + b"\n")
            shell.stdin.flush()  # it stays open: its end shows the keeper that its actor is gone
            shell.wait()
            end = KeeperEnd("its process was killed")
            for line in shell.stdout:
                message: KeeperMessage = msgspec.json.decode(line, type=KeeperMessage)
                if isinstance(message, KeeperNews):
                    print(message.text, flush=True)  # into Ray's log of this worker
                else:
                    end = message
        return msgspec.json.encode(end).decode()


class Launch:
    """The keepers of one server on a Ray cluster."""

    def __init__(self, reports: IO[bytes]) -> None:
        self._reports = reports
        self._lock = threading.Lock()  # of reports, and ends of keepers
        self._has_ended = threading.Event()
        self._engines: list[_Engine] = []

    def report(self, message: LaunchReport) -> None:
        """Tell the server's process."""
        with self._lock:
            self._reports.write(msgspec.json.encode(message) + b"\n")

    def run(self, order: LaunchOrder, orders: IO[bytes]) -> None:
        """Place keepers and keep them. Blocks: until the pipe of further orders ends.

        Raises: CapacityError, ConfigError if it cannot be.
        """
        self._order = order
        threading.Thread(target=self._follow, args=(orders,), daemon=True).start()
        if order.has_first_here:
            engine = self._add_engine()
            nodes = self._place(engine, order.deadline_s)
            _check_reachable(order.keeper.host, nodes)
            self.report(Placed(nodes))
            self._start_keeping(engine)
        else:
            _check_reachable(order.keeper.host, [node.address for node in _nodes() if node.num_cpus])
            self.report(Placed([]))  # each has a place once there is one
            self._start_engines(order.num_engines)
        self._has_ended.wait()

    def close(self) -> None:
        """End the keepers: they notice that their actors are gone."""
        for engine in self._engines:
            for actor in list(engine.actors.values()):
                ray.kill(actor)
            if engine.group is not None:
                remove_placement_group(engine.group)
        ray.shutdown()

    def _follow(self, orders: IO[bytes]) -> None:
        """Start further engines as ordered; have `run` return at the end."""
        for line in orders:
            self._start_engines(msgspec.json.decode(line, type=More).number)
        self._has_ended.set()

    def _start_engines(self, number: int) -> None:
        for _ in range(number):
            threading.Thread(target=self._run_engine, args=(self._add_engine(),), daemon=True).start()

    def _add_engine(self) -> _Engine:
        self._engines.append(_Engine(len(self._engines)))
        return self._engines[-1]

    def _run_engine(self, engine: _Engine) -> None:
        if self._order.num_keepers > 1:
            self._place(engine, math.inf)
        self._start_keeping(engine)

    def _start_keeping(self, engine: _Engine) -> None:
        for bundle in range(self._order.num_keepers):
            threading.Thread(target=self._keep, args=(engine, bundle), daemon=True).start()

    def _place(self, engine: _Engine, deadline_s: float) -> list[str]:
        """Reserve processors for all ranks of an engine; return the addresses of their nodes. Raises: CapacityError."""
        order, labels = self._order, None
        if order.has_first_here and order.placement == "strict-spread":
            labels = [{"ray.io/node-id": f"!in({ray.get_runtime_context().get_node_id()})"}] * order.num_keepers
        bundles = [{"CPU": float(order.keeper.num_threads)}] * order.num_keepers
        strategy = order.placement.upper().replace("-", "_")
        engine.group = group = placement_group(bundles, strategy=strategy, bundle_label_selector=labels)
        begun_s, has_told = time.monotonic(), False
        while not group.wait(_LOOK_S):
            if self._has_ended.is_set():
                return []
            waited_s = time.monotonic() - begun_s
            if waited_s > deadline_s:
                raise CapacityError(
                    f"{_needs(order)}, and there were none for {order.deadline_s:g} s; the cluster has "
                    f"{_nodes_text()}. Add nodes (`ray start --address=HOST:PORT` on them), or use fewer ranks "
                    "(--ranks) or threads (--threads)"
                    + (", or let ranks share nodes (--ray-placement spread)" if order.placement != "spread" else "")
                )
            if waited_s > _PATIENCE_S and not has_told:
                self.report(Progress(f"{_needs(order)}; the cluster has {_nodes_text()}"))
                has_told = True
        found = placement_group_table(group)["bundles_to_node_id"].values()
        return [node.address for node in _nodes() if node.id in found]

    def _keep(self, engine: _Engine, bundle: int) -> None:
        """Run a keeper again and again, and report why it ends, once if it is for the same reason each time."""
        pause_s, last = _FIRST_PAUSE_S, ""
        while not self._has_ended.is_set():
            begun_s = time.monotonic()
            end = self._run_once(engine, bundle)
            if self._has_ended.is_set():
                return
            if end.is_released:
                self._release(engine, bundle)
                return
            if time.monotonic() - begun_s > _STEADY_S:
                pause_s, last = _FIRST_PAUSE_S, ""
            if end.has_left:
                ray.kill(engine.actors.pop(bundle))  # the next one may be on another node
                pause_s = _MAX_PAUSE_S  # until then this node is gone, if it goes
            if end.reason != last:
                where = engine.nodes.get(bundle, "nodes")
                what = "the rank" if self._order.has_first_here else f"engine {engine.number}"
                text = f"{what} on Ray's {where} has ended: {end.reason}"
                restarts = Progress(f"{text}; it will be started again")
                self.report(restarts if end.may_retry else KeeperRefused(text, engine.number))
                last = end.reason
            self._has_ended.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _release(self, engine: _Engine, bundle: int) -> None:
        """End an actor without a keeper, and free the places of the engine with the last one."""
        with self._lock:
            ray.kill(engine.actors.pop(bundle))
            if not engine.actors and engine.group is not None:
                remove_placement_group(engine.group)
                engine.group = None

    def _run_once(self, engine: _Engine, bundle: int) -> KeeperEnd:
        """Run a keeper until it ends, or its actor."""
        node = address = ""
        try:
            if bundle not in engine.actors:
                engine.actors[bundle] = self._make_actor(engine, bundle)
            actor = engine.actors[bundle]
            node, address = ray.get(actor.node.remote())
            engine.nodes[bundle] = f"node {address}"
            keeper = msgspec.structs.replace(self._order.keeper, group=f"{engine.number}")
            return msgspec.json.decode(ray.get(actor.run.remote(msgspec.json.encode(keeper).decode())), type=KeeperEnd)
        except ActorDiedError as error:  # for good: somebody has killed it, or it cannot be made
            engine.actors.pop(bundle, None)
            return KeeperEnd(f"Ray's actor died ({_first_line(error)})")
        except RayError as error:
            if node and all(it.id != node for it in _nodes()):
                self.report(NodeLost(address))
                return KeeperEnd(f"its node is gone; {_needs(self._order)}, and the cluster has {_nodes_text()}")
            return KeeperEnd(f"Ray's actor is gone ({_first_line(error)})")

    def _make_actor(self, engine: _Engine, bundle: int) -> Any:
        place: str | PlacementGroupSchedulingStrategy = "SPREAD"
        if engine.group is not None:
            place = PlacementGroupSchedulingStrategy(engine.group, placement_group_bundle_index=bundle)
        options = {"num_cpus": self._order.keeper.num_threads, "max_restarts": -1, "scheduling_strategy": place}
        return ray.remote(KeeperActor).options(**options).remote()


@dataclasses.dataclass(eq=False, slots=True)
class _Engine:
    """The keepers of an engine's ranks."""

    number: int
    group: PlacementGroup | None = None  # None: there is but one keeper, on any node
    actors: dict[int, Any] = dataclasses.field(default_factory=dict)  # by bundle
    nodes: dict[int, str] = dataclasses.field(default_factory=dict)  # by bundle, in words


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """One of the cluster's that are alive."""

    id: str
    address: str
    num_cpus: float


def _nodes() -> list[_Node]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [_Node(it["NodeID"], it["NodeManagerAddress"], it["Resources"].get("CPU", 0.0)) for it in alive]
    return sorted(nodes, key=lambda node: node.address)


def _nodes_text() -> str:
    """Return what there is, in the words of `ray status`."""
    nodes = _nodes()
    total = sum(node.num_cpus for node in nodes)
    used = total - ray.available_resources().get("CPU", 0.0)
    each = ", ".join(f"{node.address} with {node.num_cpus:g} CPU" for node in nodes)
    return f"{len(nodes)} active node{'s' if len(nodes) > 1 else ''} ({each}), {used:g}/{total:g} CPU used"


def _needs(order: LaunchOrder) -> str:
    number = order.num_keepers
    if order.has_first_here:
        ranks = f"{number} other rank{'s need' if number > 1 else ' needs'}"
    else:
        ranks = f"{number} ranks of an engine need" if number > 1 else "an engine needs"
    nodes = "places" if number > 1 or order.has_first_here else "a place"
    if order.placement == "strict-spread" and (number > 1 or order.has_first_here):
        nodes = f"{number} node{'s' if number > 1 else ''}"
        nodes += " besides the first rank's" if order.has_first_here else ""
    return f"{ranks} {nodes} with {order.keeper.num_threads} free CPU each (--threads)"


def _connect(address: str) -> None:
    """Become a driver of the cluster. Raises: ConfigError."""
    if address != "auto":
        try:
            socket.create_connection(parse_address(address), _CONNECT_S).close()  # Ray itself would try for a minute
        except OSError as error:
            raise ConfigError(
                f"no Ray cluster answers at {address} ({error.strerror or error}): give the address that `ray start "
                "--head` has printed (--ray-address)"
            ) from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(
            f"cannot use the Ray cluster {address!r}: {_first_line(error)}; make this machine a node of it with `ray "
            "start --address=HOST:PORT`, or a cluster with `ray start --head`"
        ) from None


def _check_reachable(host: str, nodes: list[str]) -> None:
    """Raises: ConfigError if a node cannot reach the server."""
    elsewhere = [node for node in nodes if node != ray.util.get_node_ip_address()]
    if is_loopback_name(host) and elsewhere:
        raise ConfigError(
            f"processes on {', '.join(elsewhere)} cannot reach this one at {host}: name an address of this machine "
            f"that they can (--listen-ranks {ray.util.get_node_ip_address()}:PORT)"
        )


def _first_line(error: BaseException) -> str:
    return truncated(next(iter(str(error).strip().splitlines()), type(error).__name__))
