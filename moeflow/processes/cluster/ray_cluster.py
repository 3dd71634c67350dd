"""Has Ray start ranks or engines on the nodes of its cluster, and start them again when they end. The only file that
imports Ray.

It runs in a process of its own, which Ray may end: it does so when the cluster's head is gone for long. Ray places an
actor for each rank. The actor only runs the rank's process, which joins the first rank like `moeflow join`, or the
keeper of an engine, which connects to the server. Results never pass through Ray.

These processes are no children of Ray's: Ray kills its workers' children when a node loses the cluster, but a rank
continues until the engine ends (`orphan_watch.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
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
    LaunchOrder,
    LaunchReport,
    More,
    Placed,
    RankEnd,
    RankMessage,
    RankNews,
    RankProgress,
    RankRefused,
    Unplaced,
)

_CONNECT_S: Final = 5.0
_LOOK_S: Final = 0.5
_PATIENCE_S: Final = 2.0  # places that exist are found sooner
_FIRST_PAUSE_S: Final = 0.5  # before a rank is started again; each pause twice as long as the one before
_MAX_PAUSE_S: Final = 30.0
_STEADY_S: Final = 60.0  # a rank that has run so long begins with the first pause again
# The shell ends at once, which leaves the rank's process to the system's first one. Descriptor 3 passes its standard
# input on, since shells give background processes none.
_DETACHED: Final = ("sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh")


def main() -> None:
    """Entry point of the process: ends its ranks, and itself, when its standard input does."""
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


class RankKeeper:
    """The actor: keeps one rank's process on its node."""

    def run(self, order: str) -> str:
        """Run the process of a `RankOrder` until it ends; return its `RankEnd`. Both are JSON."""
        command = (
            *_DETACHED,
            sys.executable,
            "-m",
            "moeflow.parallel.child_main",
            "moeflow.processes.cluster.ray_rank",
        )
        shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert shell.stdin is not None
        assert shell.stdout is not None
        with shell.stdin, shell.stdout:
            shell.stdin.write(order.encode() + b"\n")
            shell.stdin.flush()  # it stays open: its end shows the rank that its actor is gone
            shell.wait()
            end = RankEnd("its process was killed")
            for line in shell.stdout:
                message: RankMessage = msgspec.json.decode(line, type=RankMessage)
                if isinstance(message, RankNews):
                    print(message.text, flush=True)  # into Ray's log of this worker
                else:
                    end = message
        return msgspec.json.encode(end).decode()


class Launch:
    """The ranks, or the engines, of one server on a Ray cluster."""

    def __init__(self, reports: IO[bytes]) -> None:
        self._reports = reports
        self._lock = threading.Lock()  # of reports
        self._has_ended = threading.Event()
        self._group: PlacementGroup | None = None
        self._actors: dict[int, Any] = {}  # by bundle
        self._bundles = itertools.count()

    def report(self, message: LaunchReport) -> None:
        """Tell the server's process."""
        with self._lock:
            self._reports.write(msgspec.json.encode(message) + b"\n")

    def _follow(self, orders: IO[bytes]) -> None:
        """Start further engines as ordered; have `run` return at the end."""
        for line in orders:
            self._start_keeping(msgspec.json.decode(line, type=More).number)
        self._has_ended.set()

    def run(self, order: LaunchOrder, orders: IO[bytes]) -> None:
        """Place processes and keep them. Blocks: until the pipe of further orders ends.

        Raises: CapacityError, ConfigError if it cannot be.
        """
        self._order = order
        threading.Thread(target=self._follow, args=(orders,), daemon=True).start()
        if order.rank.keeps_engine:
            _check_reachable(order.rank.host, [node.address for node in _nodes() if node.num_cpus])
            self.report(Placed([]))  # each has a place once there is one
        else:
            self._group = self._place()
            if self._group is None:
                return
            nodes = [self._node(bundle) for bundle in range(order.num_ranks)]
            _check_reachable(order.rank.host, nodes)
            self.report(Placed(nodes))
        self._start_keeping(order.num_ranks)
        self._has_ended.wait()

    def _start_keeping(self, number: int) -> None:
        for _ in range(number):
            threading.Thread(target=self._keep, args=(next(self._bundles),), daemon=True).start()

    def close(self) -> None:
        """End the ranks: they notice that their actors are gone."""
        for actor in list(self._actors.values()):
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()

    def _place(self) -> PlacementGroup | None:
        """Reserve processors on nodes; None: it is to end. Raises: CapacityError."""
        order = self._order
        strategy, labels = "SPREAD", None
        if not order.shares_nodes:
            own = {"ray.io/node-id": f"!in({ray.get_runtime_context().get_node_id()})"}
            strategy, labels = "STRICT_SPREAD", [own] * order.num_ranks
        bundles = [{"CPU": float(order.rank.num_threads)}] * order.num_ranks
        group = placement_group(bundles, strategy=strategy, bundle_label_selector=labels)
        begun_s, has_told = time.monotonic(), False
        while not group.wait(_LOOK_S):
            if self._has_ended.is_set():
                return None
            waited_s = time.monotonic() - begun_s
            if waited_s > order.deadline_s:
                remove_placement_group(group)
                raise CapacityError(
                    f"{_needs(order)}, and there were none for {order.deadline_s:g} s; the cluster has "
                    f"{_nodes_text()}. Add nodes (`ray start --address=HOST:PORT` on them), or use fewer ranks "
                    "(--ranks) or threads (--threads)"
                    + ("" if order.shares_nodes else ", or let ranks share nodes (--ray-placement spread)")
                )
            if waited_s > _PATIENCE_S and not has_told:
                self.report(RankProgress(f"{_needs(order)}; the cluster has {_nodes_text()}"))
                has_told = True
        return group

    def _keep(self, bundle: int) -> None:
        """Run a rank again and again, and report why it ends, once if it is for the same reason each time."""
        pause_s, last, node = _FIRST_PAUSE_S, "", self._node(bundle)
        while not self._has_ended.is_set():
            begun_s = time.monotonic()
            end = self._run_once(bundle)
            if self._has_ended.is_set():
                return
            if end.is_released:
                ray.kill(self._actors.pop(bundle))
                return
            if time.monotonic() - begun_s > _STEADY_S:
                pause_s, last = _FIRST_PAUSE_S, ""
            if end.has_left:
                ray.kill(self._actors.pop(bundle))  # the next one may be on another node
                pause_s = _MAX_PAUSE_S  # until then this node is gone, if it goes
            node, was = self._node(bundle) or node, node
            if end.reason != last:
                what = f"the rank on Ray's node {was}" if self._group is not None else f"engine {bundle} on Ray's nodes"
                text = f"{what} has ended: {end.reason}"
                restarts = RankProgress(f"{text}; it will be started again")
                self.report(restarts if end.may_retry else RankRefused(text, bundle))
                last = end.reason
            self._has_ended.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _run_once(self, bundle: int) -> RankEnd:
        """Run a rank until it ends, or what keeps it."""
        try:
            if bundle not in self._actors:
                self._actors[bundle] = self._make_actor(bundle)
            order = msgspec.json.encode(self._order.rank).decode()
            return msgspec.json.decode(ray.get(self._actors[bundle].run.remote(order)), type=RankEnd)
        except ActorDiedError as error:  # for good: somebody has killed it, or it cannot be made
            self._actors.pop(bundle, None)
            return RankEnd(f"Ray's actor died ({_first_line(error)})")
        except RayError as error:
            if self._group is not None and not self._node(bundle):
                return RankEnd(f"its node is gone; {_needs(self._order)}, and the cluster has {_nodes_text()}")
            return RankEnd(f"Ray's actor is gone ({_first_line(error)})")

    def _make_actor(self, bundle: int) -> Any:
        place: str | PlacementGroupSchedulingStrategy = "SPREAD"
        if self._group is not None:
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {"num_cpus": self._order.rank.num_threads, "max_restarts": -1, "scheduling_strategy": place}
        return ray.remote(RankKeeper).options(**options).remote()

    def _node(self, bundle: int) -> str:
        """Return the address of a rank's node; empty: it has none, or an engine's, which may move."""
        if self._group is None:
            return ""
        try:
            found = placement_group_table(self._group)["bundles_to_node_id"].get(bundle)
            return next((it.address for it in _nodes() if it.id == found), "")
        except RayError:
            return ""


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
    number = order.num_ranks
    ranks = f"{number} other rank{'s need' if number > 1 else ' needs'}"
    nodes = "places" if order.shares_nodes else f"{number} node{'s' if number > 1 else ''} besides the first rank's"
    return f"{ranks} {nodes} with {order.rank.num_threads} free CPU each (--threads)"


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
    """Raises: ConfigError if a node cannot reach the first rank, or the server."""
    elsewhere = [node for node in nodes if node != ray.util.get_node_ip_address()]
    if is_loopback_name(host) and elsewhere:
        raise ConfigError(
            f"processes on {', '.join(elsewhere)} cannot reach this one at {host}: name an address of this machine "
            f"that they can (--listen-ranks {ray.util.get_node_ip_address()}:PORT)"
        )


def _first_line(error: BaseException) -> str:
    return truncated(next(iter(str(error).strip().splitlines()), type(error).__name__))
