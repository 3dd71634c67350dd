"""How soon a server notices engines, ranks and machines that are killed, stopped or cut off, and serves again.

    python -m studies.failure_times [MODEL] --out FILE

Machines are network namespaces of this one (needs root). Each case starts a server with two streams, disturbs one
process or cable, and watches /health and the streams until all is ready again. A joined machine more than needed is the
spare.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.errors import EngineError
from studies.harness.command import run_study
from studies.harness.ray_nodes import Node, ip, networked
from studies.harness.records import publish

PORT = 9200
PATIENCE_S = 120.0
SETTLE_S = 1.0  # between the first token and the disturbance
ENGINE, RANK, JOINER = "moeflow.processes.main", "moeflow.engine.ranks.main", "moeflow.cli.main"
# Runs in the server's network: a line of JSON for each change of /health, and for each token.
CLIENT = """
import json, os, sys, threading, time, urllib.error, urllib.request
url = sys.argv[1]
def say(**what):
    os.write(1, json.dumps({"at_s": time.monotonic(), **what}).encode() + b"\\n")
def watch():
    last = None
    while True:
        try:
            found = json.load(urllib.request.urlopen(url + "/health", timeout=5))
        except urllib.error.HTTPError as error:
            found = {"status": json.load(error)["error"]["code"], "num_replicas_ready": 0}
        now = found["status"], found["num_replicas_ready"]
        if now != last:
            say(status=now[0], num_ready=now[1])
        last = now
        time.sleep(0.02)
def ask(stream):
    body = {"prompt": "Once", "max_tokens": 200, "temperature": 0, "stream": True, "ignore_eos": True}
    while True:
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            for line in urllib.request.urlopen(request, timeout=300):
                if line.startswith(b"data: {"):
                    say(stream=stream, error=json.loads(line[6:]).get("error"))
        except urllib.error.HTTPError as error:
            say(stream=stream, error=error.read().decode())
            time.sleep(0.1)
for stream in range(2):
    threading.Thread(target=ask, args=(stream,), daemon=True).start()
watch()
"""


class Layout(NamedTuple):
    """A way to serve."""

    options: tuple[str, ...]  # of `moeflow serve`
    num_joiners: int = 0
    join_options: tuple[str, ...] = ()
    num_ready: int = 1  # engines


LAYOUTS = {
    "one engine": Layout(()),
    "two engines": Layout(("--replicas", "2"), num_ready=2),
    "two ranks": Layout(("--ranks", "2")),
    "two joined engines": Layout(("--replicas", "2", "--listen-ranks"), 3, ("--replica",), 2),
    "two joined ranks": Layout(("--ranks", "2", "--listen-ranks"), 2),
}
CASES = (
    *((layout, "engine", act) for layout in ("one engine", "two engines") for act in ("killed", "stopped")),
    *(("two ranks", "rank", act) for act in ("killed", "stopped")),
    *(("two joined engines", what, act) for what in ("engine", "keeper") for act in ("killed", "stopped")),
    ("two joined engines", "machine", "cut"),
    *(("two joined ranks", "rank", act) for act in ("killed", "stopped")),
    ("two joined ranks", "machine", "cut"),
)


class Watched:
    """A server with streams, and the events of its client."""

    def __init__(self, nodes: list[Node], url: str) -> None:
        self._nodes, self._url = nodes, url
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.events: list[dict[str, Any]] = []
        command = [*nodes[0].prefix, sys.executable, "-c", CLIENT, url]
        self.client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.client.stdout is not None
        for line in self.client.stdout:
            self._lines.put(json.loads(line))

    def until(self, is_wanted: Callable[[dict[str, Any]], bool]) -> float:
        """Return when a wanted event came, or comes. Raises: EngineError if it does not."""
        last_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < last_s:
            with contextlib.suppress(queue.Empty):
                event = self._lines.get(timeout=1)
                self.events.append(event)
                if is_wanted(event):
                    return float(event["at_s"])
        raise EngineError(f"the server did not come back: {self.events[-3:]}")

    def stats(self) -> dict[str, Any]:
        """Return the server's numbers."""
        read = f"import urllib.request as r; print(r.urlopen('{self._url}/stats').read().decode())"
        command = [*self._nodes[0].prefix, sys.executable, "-c", read]
        found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return found


@contextlib.contextmanager
def serving(nodes: list[Node], layout: Layout, model: str | None, log: Path) -> Iterator[Watched]:
    """Run a server on the first node, and joiners on others."""
    head, moeflow = nodes[0], (sys.executable, "-m", "moeflow.cli.main")
    address = f"{head.address}:{PORT}"
    command = [*head.prefix, *moeflow, "serve", *([model] if model else []), "--port", "0", *layout.options]
    command += [address, "--threads", "1"] if layout.num_joiners else []
    with contextlib.ExitStack() as undo:
        errors = undo.enter_context(log.open("w"))
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        undo.callback(lambda: [node.kill() for node in nodes])
        for node in nodes[1 : 1 + layout.num_joiners]:
            joining = (*node.prefix, *moeflow, "join", address, *layout.join_options, "--threads", "1")
            undo.callback(subprocess.Popen(joining, stdout=errors, stderr=errors).wait)
        undo.callback(server.wait)
        undo.callback(lambda: [node.kill() for node in nodes])
        url = re.search(r"http://\S+", server.stdout.readline() if server.stdout else "")
        if url is None:
            raise EngineError(f"the server did not start: {log.read_text()[-2000:]}")
        yield Watched(nodes, url[0])


def disturb(nodes: list[Node], watched: Watched, what: str, act: str) -> Callable[[], None]:
    """Kill, stop or cut off one process or machine; return the function that undoes it, as far as possible."""
    hosts = [rank["host"] for rank in watched.stats()["ranks"]]
    victim = next((node for node in nodes[1:] if node.address in hosts or node.pids(ENGINE)), nodes[0])
    if act == "cut":
        ip("-n", victim.namespace, "link", "set", "cable", "down")
        return lambda: ip("-n", victim.namespace, "link", "set", "cable", "up") and None
    names = {"engine": (ENGINE,), "keeper": (JOINER,), "rank": (RANK,) if victim is nodes[0] else (ENGINE, JOINER)}
    pid = next(pid for name in names[what] for pid in victim.pids(name))
    os.kill(pid, signal.SIGKILL if act == "killed" else signal.SIGSTOP)

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return go_on


def measure(nodes: list[Node], case: tuple[str, str, str], model: str | None, log: Path) -> dict[str, Any]:
    """Return the times of one case, from the disturbance on."""
    name, what, act = case
    layout = LAYOUTS[name]
    with serving(nodes, layout, model, log) as watched:
        watched.until(lambda event: event.get("num_ready") == layout.num_ready)
        watched.until(lambda event: "stream" in event)
        time.sleep(SETTLE_S)
        begun_s = time.monotonic()
        undo = disturb(nodes, watched, what, act)
        seen_s = watched.until(
            lambda event: event["at_s"] > begun_s and event.get("num_ready", layout.num_ready) < layout.num_ready
        )
        ready_s = watched.until(lambda event: event.get("num_ready") == layout.num_ready)
        for stream in range(2):
            watched.until(lambda event, stream=stream: event["at_s"] > ready_s and event.get("stream") == stream)
        undo()
        watched.client.kill()
        watched.client.wait()
    tokens = [event for event in watched.events if "error" in event]
    times = [[it["at_s"] for it in tokens if it["stream"] == each and not it["error"]] for each in range(2)]
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, times))
    return {
        "layout": name,
        "what": f"{what} {act}",
        "seen_s": round(seen_s - begun_s, 2),
        "pause_s": round(max(after - before for before, after in pairs if after > begun_s), 2),
        "whole_s": round(ready_s - begun_s, 2),
        "num_errors": sum(bool(event["error"]) for event in tokens),
    }


def table(record: Record) -> Table:
    """Return the cases."""
    rows = [
        (it["layout"], it["what"], f"{it['seen_s']:.1f} s", f"{it['pause_s']:.1f} s", f"{it['whole_s']:.1f} s")
        for it in record["cases"]
    ]
    columns = ("served by", "event", "seen in /health after", "longest pause", "all ready again after")
    return Table("Failures of processes and machines", columns, tuple(rows))


@click.command(help=__doc__)
@click.argument("model", required=False)
@click.option("--only", default="", help="Measure cases with this text in their names.")
@result_options
def main(model: str | None, only: str, as_json: bool, out: Path | None) -> int:
    """Run it; return 1 if a stream ended with an error."""
    if os.geteuid() != 0:
        raise EngineError("network namespaces need root")
    with networked(4) as nodes, tempfile.TemporaryDirectory(prefix="failures-") as folder:
        log = Path(folder) / "server.log"
        found = [measure(nodes, case, model, log) for case in CASES if only in " ".join(case)]
    publish("failure_times", table, out, as_json=as_json, cases=found)
    return 1 if any(it["num_errors"] for it in found) else 0


if __name__ == "__main__":
    run_study(main)
