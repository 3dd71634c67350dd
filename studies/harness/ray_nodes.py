"""A Ray cluster on one machine: each node in a network namespace of its own, with a switch between them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

PATIENCE_S = 90.0
PORT = 6379
Result = TypeVar("Result")
_CLONE_NEWNET = 0x40000000
_NETWORK = "10.213.78"
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",  # after which nodes without a head give up
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_DISABLE_MEMORY_MONITOR": "1",
    "RAY_AUTH_MODE": "disabled",  # else a token in the user's home decides
}


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Node:
    """A machine, as far as Ray and ranks can tell."""

    def __init__(self, namespace: str, number: int) -> None:
        self.namespace = namespace
        self.address = f"{_NETWORK}.{number}"
        self.prefix = ("ip", "netns", "exec", namespace, "env", *(f"{k}={v}" for k, v in _ENVIRONMENT.items()))

    def ray_start(self, folder: Path, head: Node | None, num_cpus: int) -> None:
        """Make it a node of a cluster, the head of a new one if there is none."""
        options = [f"--node-ip-address={self.address}", f"--num-cpus={num_cpus}", "--object-store-memory=80000000"]
        options.append("--include-log-monitor=false")
        if head is None:
            options += ["--head", f"--port={PORT}", f"--temp-dir={folder}", "--include-dashboard=false"]
        else:
            options += [f"--address={head.address}:{PORT}"]
        command = [*self.prefix, sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        subprocess.run(command, check=True, capture_output=True)

    def hide(self, folder: Path) -> None:
        """Have later processes see an empty folder in the place of this one."""
        script = f"mount -t tmpfs none '{folder}' && exec \"$@\""
        self.prefix = (*self.prefix, "unshare", "--mount", "sh", "-c", script, "sh")

    def enter(self, call: Callable[[], Result]) -> Result:
        """Return the result of a call in a thread whose network, and that of threads it starts, is this node's."""

        def entered() -> Result:
            with Path(f"/run/netns/{self.namespace}").open() as network:
                if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "cannot enter the network of a node")
            return call()

        with ThreadPoolExecutor(1) as threads:
            return threads.submit(entered).result()

    def pids(self, name: str = "") -> list[int]:
        """Return its processes with this in their command lines."""
        found = []
        for pid in map(int, ip("netns", "pids", self.namespace).split()):
            with contextlib.suppress(OSError):
                if name in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found

    def kill(self, name: str = "") -> None:
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def expect(self, name: str, number: int) -> list[int]:
        """Wait until it has so many processes of this name."""
        deadline_s = time.monotonic() + PATIENCE_S
        while len(found := self.pids(name)) != number:
            assert time.monotonic() < deadline_s, (self.address, name, found)
            time.sleep(0.05)
        return found


@contextlib.contextmanager
def networked(number: int) -> Iterator[list[Node]]:
    """Nodes that reach each other. Raises: OSError, CalledProcessError where the system does not allow that."""
    nodes = [Node(f"moeflow-{os.getpid()}-ray{each}", each) for each in range(1, number + 1)]
    first = nodes[0].namespace
    with contextlib.ExitStack() as undo:
        for node in nodes:
            ip("netns", "add", node.namespace)
            undo.callback(ip, "netns", "delete", node.namespace)
            undo.callback(node.kill)
            ip("-n", node.namespace, "link", "set", "lo", "up")
        ip("-n", first, "link", "add", "switch", "type", "bridge")
        _set_up(nodes[0], "switch")
        for each, node in enumerate(nodes[1:]):
            ip("link", "add", "cable", "netns", node.namespace, "type", "veth", "peer", f"port{each}", "netns", first)
            ip("-n", first, "link", "set", f"port{each}", "master", "switch", "up")
            _set_up(node, "cable")
        yield nodes


def _set_up(node: Node, device: str) -> None:
    ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", device)
    ip("-n", node.namespace, "link", "set", device, "up")


def start_all(nodes: Sequence[Node], folder: Path) -> None:
    """Make a cluster of them; the first is its head. One by one: on one machine they would get in each other's way."""
    head, *others = nodes
    head.ray_start(folder, None, num_cpus=1)
    for node in others:
        node.ray_start(folder, head, num_cpus=1)
