"""What streams notice when replicas on the nodes of a Ray cluster, their keepers, nodes or Ray itself are killed.

    python -m studies.node_replicas [MODEL] --out FILE

Nodes are network namespaces of this machine (needs root): a head with the server, and two nodes. Two replicas serve
several streams; in each round something else is killed. Tokens must equal those of a round without a disturbance.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.cli.chaos.streams import Stream, connect, make_bodies, stream_all
from moeflow.core.errors import EngineError
from studies.harness.command import run_study
from studies.harness.ray_nodes import PORT, Node, networked, start_all
from studies.harness.records import publish

ENGINE = "moeflow.processes.main"
KEEPER = "moeflow.processes.cluster.ray_keeper"
PATIENCE_S = 300.0


@dataclass
class Cluster:
    """A server on the first node, and its replicas."""

    nodes: list[Node]
    url: str
    server: subprocess.Popen[str]

    def ask(self, disturb: Callable[[], None], *, number: int, num_tokens: int) -> tuple[list[Stream], float]:
        """Stream completions, disturb them once all have begun, and return them and the longest pause."""
        streams = [Stream() for _ in range(number)]

        async def stream() -> None:
            async with connect(self.url) as client:
                streaming = asyncio.create_task(stream_all(client, make_bodies(number, num_tokens), streams))
                while not all(each.times_s or each.is_over for each in streams):
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(disturb)
                await streaming

        self.nodes[0].enter(lambda: asyncio.run(stream()))
        if failed := next((each for each in streams if not each.is_complete), None):
            raise EngineError(f"a stream has ended with an error: {failed.error or failed.refusal}")
        return streams, max(each.longest_pause(0.0, time.monotonic()) for each in streams)

    def health(self) -> dict[str, Any]:
        """Return the server's health."""
        found: dict[str, Any] = self.nodes[0].enter(lambda: httpx.get(f"{self.url}/health", trust_env=False).json())
        return found

    def until_ready(self, number: int) -> float:
        """Wait until so many replicas are ready; return how long that took."""
        begun_s = time.monotonic()
        while (health := self.health())["num_replicas_ready"] != number:
            if time.monotonic() - begun_s > PATIENCE_S:
                raise EngineError(f"the replicas are not ready: {health}")
            time.sleep(0.1)
        return time.monotonic() - begun_s

    def homes(self) -> list[Node]:
        """Return the nodes with an engine; first those that are not the server's."""
        return [node for node in (*self.nodes[1:], self.nodes[0]) if node.pids(ENGINE)]


@contextlib.contextmanager
def serving(nodes: list[Node], model: str | None, log: Path) -> Iterator[Cluster]:
    """Run a server of two replicas on the first node."""
    command = [*nodes[0].prefix, sys.executable, "-m", "moeflow.cli.main", "serve", *([model] if model else [])]
    command += ["--port", "0", "--replicas", "2", "--ray-address", f"{nodes[0].address}:{PORT}", "--threads", "1"]
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as server:
        try:
            address = re.search(r"http://\S+", server.stdout.readline() if server.stdout else "")
            if address is None:
                raise EngineError(f"the server did not start: {log.read_text()[-2000:]}")
            yield Cluster(nodes, address[0], server)
        finally:
            server.terminate()
            server.wait(60)


def measure(cluster: Cluster, *, streams: int, tokens: int, gcs_gone_s: float) -> dict[str, Any]:
    """Return the longest pause of each round, and how long the second replica took to be ready again."""
    head = cluster.nodes[0]

    def ask(disturb: Callable[[], None]) -> tuple[list[Stream], float]:
        return cluster.ask(disturb, number=streams, num_tokens=tokens)

    def without_ray() -> None:
        head.kill("gcs_server")
        time.sleep(gcs_gone_s)

    cluster.until_ready(2)
    calm, pause_s = ask(lambda: None)
    rounds: dict[str, dict[str, Any]] = {"nothing": {"pause_s": pause_s, "is_equal": True}}
    for name, disturb in (
        ("an engine", lambda: cluster.homes()[0].kill(ENGINE)),
        ("a keeper", lambda: cluster.homes()[0].kill(KEEPER)),
        ("a node", lambda: cluster.homes()[0].kill()),
        (f"Ray's head, for {gcs_gone_s:g} s", without_ray),
    ):
        found, pause_s = ask(disturb)
        is_equal = not any(stream.difference(before) for before, stream in zip(calm, found, strict=True))
        rounds[name] = {"pause_s": round(pause_s, 3), "is_equal": is_equal}
        if disturb is not without_ray:
            rounds[name]["ready_again_s"] = round(cluster.until_ready(2), 1)
    return {"streams": streams, "tokens": tokens, "rounds": rounds}


def table(record: Record) -> Table:
    """Return the rounds."""
    rows = [
        (name, f"{it['pause_s']:.2f} s", "yes" if it["is_equal"] else "no", f"{it.get('ready_again_s', '')}")
        for name, it in record["rounds"].items()
    ]
    title = f"Two replicas on a Ray cluster, {record['streams']} streams of {record['tokens']} tokens"
    return Table(title, ("killed", "longest pause", "same text", "both ready again, s"), tuple(rows))


@click.command(help=__doc__)
@click.argument("model", required=False)
@click.option("--streams", default=4, show_default=True)
@click.option("--tokens", default=400, show_default=True, help="Of each stream.")
@click.option("--gcs-gone-s", default=120.0, show_default=True, help="How long streams go on without Ray's head.")
@result_options
def main(model: str | None, streams: int, tokens: int, gcs_gone_s: float, as_json: bool, out: Path | None) -> int:
    """Run it; return 1 if a text differs."""
    if os.geteuid() != 0:
        raise EngineError("network namespaces need root")
    with networked(3) as nodes, tempfile.TemporaryDirectory(prefix="ray-") as folder:
        start_all(nodes, Path(folder))
        with serving(nodes, model, Path(folder) / "server.log") as cluster:
            found = measure(cluster, streams=streams, tokens=tokens, gcs_gone_s=gcs_gone_s)
    publish("node_replicas", table, out, as_json=as_json, threads=1, **found)
    return 0 if all(it["is_equal"] for it in found["rounds"].values()) else 1


if __name__ == "__main__":
    run_study(main)
