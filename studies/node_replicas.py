"""What streams notice when replicas on the nodes of a Ray cluster, their keepers, nodes or Ray itself are killed.

    python -m studies.node_replicas [MODEL] --out FILE

Nodes are network namespaces of this machine (needs root): a head with the server, and two nodes. Two replicas serve
several streams; in each round something else is killed. Tokens must equal those of a round without a disturbance.
"""

from __future__ import annotations

import contextlib
import json
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

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.errors import EngineError
from studies.harness.command import run_study
from studies.harness.ray_nodes import PORT, Node, networked, start_all
from studies.harness.records import publish

ENGINE = "moeflow.processes.main"
KEEPER = "moeflow.processes.cluster.ray_rank"
PATIENCE_S = 300.0
# Runs in the head's network: one thread a stream; prints texts and the longest pause of all.
CLIENT = """
import json, os, sys, threading, time, urllib.request
def fail(found):
    print(found.exc_value, file=sys.stderr)
    os._exit(1)
threading.excepthook = fail
url, number, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
texts, pauses, begun = [""] * number, [0.0] * number, threading.Semaphore(0)
def stream(each):
    body = {"prompt": f"Story {each}: once", "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    last = None
    for line in urllib.request.urlopen(request, timeout=300):
        if line.startswith(b"data: {"):
            now = time.monotonic()
            if last is None:
                begun.release()
            else:
                pauses[each] = max(pauses[each], now - last)
            last = now
            texts[each] += json.loads(line[6:])["choices"][0]["text"]
threads = [threading.Thread(target=stream, args=(each,)) for each in range(number)]
for thread in threads: thread.start()
for _ in threads: begun.acquire()
print("begun", flush=True)
for thread in threads: thread.join()
print(json.dumps({"texts": texts, "pause_s": max(pauses)}), flush=True)
"""


@dataclass
class Cluster:
    """A server on the first node, and its replicas."""

    nodes: list[Node]
    url: str
    server: subprocess.Popen[str]

    def ask(self, disturb: Callable[[], None], *, number: int, num_tokens: int) -> dict[str, Any]:
        """Stream completions, disturb them once all have begun, and return texts and the longest pause."""
        command = [*self.nodes[0].prefix, sys.executable, "-c", CLIENT, self.url, str(number), str(num_tokens)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            if client.stdout.readline() != "begun\n":
                raise EngineError("no stream has begun")
            disturb()
            found: dict[str, Any] = json.loads(client.stdout.readline() or "{}")
        if not found:
            raise EngineError("the streams have ended with an error")
        return found

    def health(self) -> dict[str, Any]:
        """Return what the server says of itself."""
        read = f"import urllib.request as r; print(r.urlopen('{self.url}/health').read().decode())"
        command = [*self.nodes[0].prefix, sys.executable, "-c", read]
        found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
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

    def ask(disturb: Callable[[], None]) -> dict[str, Any]:
        return cluster.ask(disturb, number=streams, num_tokens=tokens)

    def without_ray() -> None:
        head.kill("gcs_server")
        time.sleep(gcs_gone_s)

    cluster.until_ready(2)
    plain = ask(lambda: None)
    rounds: dict[str, dict[str, Any]] = {"nothing": {"pause_s": plain["pause_s"], "is_equal": True}}
    for name, disturb in (
        ("an engine", lambda: cluster.homes()[0].kill(ENGINE)),
        ("a keeper", lambda: cluster.homes()[0].kill(KEEPER)),
        ("a node", lambda: cluster.homes()[0].kill()),
        (f"Ray's head, for {gcs_gone_s:g} s", without_ray),
    ):
        found = ask(disturb)
        is_equal = found["texts"] == plain["texts"]
        rounds[name] = {"pause_s": round(found["pause_s"], 3), "is_equal": is_equal}
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
