"""Claim: a server keeps at least 85% of the speed of 8 and of 16 engines.

    python -m studies.sleeping_engines --out FILE
    python -m studies.sleeping_engines --replicas 16 --through ray

Engines take real messages, but sleep instead of computing: many fit on this machine. Each has 8 requests in a pass, so
its ideal speed is 8 tokens a pass. They are started by `moeflow join`, or by Ray in a network namespace
(needs root). More clients than places keep all busy.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.errors import EngineError
from studies.harness.command import run_study
from studies.harness.needs import ROOT
from studies.harness.ray_nodes import PORT, networked
from studies.harness.records import publish
from studies.sleeping_engines.runner import PASS_S
from tests.tiny_mixtral import write_tiny_mixtral

SEATS = 8  # requests of an engine in a pass
STREAMS_PER_SEAT = 1.5
PATIENCE_S = 300.0
COMMAND = (sys.executable, "-m", "moeflow.cli.main")
SITE = """
import sys
if "moeflow.processes.main" in sys.orig_argv:
    from studies.sleeping_engines.runner import install
    install()
"""


@dataclass(frozen=True)
class Place:
    """Where a server and its engines run."""

    folder: Path
    prefix: Sequence[str]
    environment: Mapping[str, str]

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command there."""
        return subprocess.Popen([*self.prefix, *command], env=self.environment, text=True, **options)


@contextlib.contextmanager
def joined(place: Place, number: int) -> Iterator[tuple[str, ...]]:
    """Yield the options of a server that engines join by hand, and have them join."""
    port, token = 9241, place.folder / "token"
    token.write_text("ab" * 32)
    token.chmod(0o600)
    join = (*COMMAND, "join", f"127.0.0.1:{port}", "--threads", "1", "--cluster-token-file", str(token))
    with (place.folder / "join.log").open("w") as log:
        keepers = [place.popen(*join, stdout=log, stderr=log) for _ in range(number)]
        try:
            yield "--listen-ranks", f"127.0.0.1:{port}", "--cluster-token-file", str(token)
        finally:
            for keeper in keepers:
                keeper.terminate()
            for keeper in keepers:
                keeper.wait()


@contextlib.contextmanager
def on_ray(place: Place, number: int) -> Iterator[tuple[str, ...]]:
    """Yield the options of a server on a Ray cluster with so many processors."""
    options = ("--head", f"--port={PORT}", f"--num-cpus={number}", "--node-ip-address=127.0.0.1")
    start = (sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--include-dashboard=false")
    with place.popen(*start, f"--temp-dir={place.folder}/ray", stdout=subprocess.DEVNULL) as started:
        if started.wait(PATIENCE_S):
            raise EngineError("Ray does not start")
    yield "--ray-address", f"127.0.0.1:{PORT}"


def measure(place: Place, options: Sequence[str], number: int, *, pass_s: float, seconds: float) -> dict[str, Any]:
    """Return what so many engines bring, and the processor time of the server."""
    model = place.folder / "model"
    sizes = ("--threads", "1", "--max-num-seqs", str(SEATS), "--kv-cache", "64MiB")
    command = (*COMMAND, "serve", str(model), "--port", "0", "--replicas", str(number), *sizes, *options)
    log = place.folder / "server.log"
    with log.open("w") as errors, place.popen(*command, stdout=subprocess.PIPE, stderr=errors) as server:
        try:
            address = re.search(r"http://\S+", server.stdout.readline() if server.stdout else "")
            if address is None:
                raise EngineError(f"the server did not start: {log.read_text()[-2000:]}")
            until_ready(place, address[0], number)
            streams = str(int(SEATS * number * STREAMS_PER_SEAT))
            warm_up_s = str(max(10.0, 20 * pass_s))
            client = (sys.executable, "-m", "studies.sleeping_engines.workers.client", address[0], streams, warm_up_s)
            with place.popen(*client, str(seconds), stdout=subprocess.PIPE) as measuring:
                assert measuring.stdout is not None
                measuring.stdout.readline()
                before_s = processor_s(server)
                found = json.loads(measuring.stdout.readline() or "{}")
                spent_s = processor_s(server) - before_s
            if not found:
                raise EngineError(f"the streams have ended: {log.read_text()[-2000:]}")
        finally:
            server.terminate()
            server.wait(60)
    speed = found["tokens"] / found["seconds"]
    return {
        "replicas": number,
        "tokens_per_s": round(speed, 1),
        "ideal_tokens_per_s": round(number * SEATS / pass_s, 1),
        "share": round(speed * pass_s / (number * SEATS), 3),
        "front_us": round(spent_s / found["tokens"] * 1e6, 1),
    }


def processor_s(server: subprocess.Popen[str]) -> float:
    """Return the processor time of a server, without its engines."""
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


def until_ready(place: Place, url: str, number: int) -> None:
    """Wait until so many replicas are ready. Raises: EngineError if they do not come."""
    read = f"import urllib.request as r; print(r.urlopen('{url}/health').read().decode())"
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        with place.popen(sys.executable, "-c", read, stdout=subprocess.PIPE) as asking:
            found = json.loads(asking.communicate()[0])
        if found["num_replicas_ready"] == number:
            return
        if time.monotonic() > deadline_s:
            raise EngineError(f"the replicas are not ready: {found}")
        time.sleep(1.0)


def run_case(through: str, number: int, *, pass_s: float, seconds: float) -> dict[str, Any]:
    """Measure one number of engines."""
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="sl-", ignore_cleanup_errors=True)))
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        write_tiny_mixtral(folder / "model")
        path = os.pathsep.join((str(folder / "site"), str(ROOT)))
        environment = {**os.environ, "PYTHONPATH": path, PASS_S: str(pass_s)}
        if through == "ray":
            node = undo.enter_context(networked(1))[0]
            place = Place(folder, node.prefix, environment)
            options = undo.enter_context(on_ray(place, number))
        else:
            place = Place(folder, (), environment)
            options = undo.enter_context(joined(place, number))
        return {"through": through, **measure(place, options, number, pass_s=pass_s, seconds=seconds)}


def table(record: Record) -> Table:
    """Return the cases."""
    rows = [
        (
            it["through"],
            str(it["replicas"]),
            f"{it['tokens_per_s']:.0f}",
            f"{it['ideal_tokens_per_s']:.0f}",
            f"{it['share']:.0%}",
            f"{it['front_us']:.0f}",
        )
        for it in record["cases"]
    ]
    title = f"Engines that sleep {record['pass_s'] * 1000:g} ms a pass of {SEATS} requests"
    head = ("through", "engines", "tokens/s", "ideal", "share", "front, us of processor time a token")
    return Table(title, head, tuple(rows))


@click.command(help=__doc__)
@click.option("--replicas", "numbers", multiple=True, default=(8, 16), show_default=True)
@click.option("--through", multiple=True, type=click.Choice(("join", "ray")), default=("join", "ray"))
@click.option("--pass-s", default=0.1, show_default=True, help="Seconds of a pass.")
@click.option("--seconds", default=20.0, show_default=True, help="How long to measure.")
@result_options
def main(
    numbers: Sequence[int], through: Sequence[str], pass_s: float, seconds: float, as_json: bool, out: Path | None
) -> None:
    """Measure all cases."""
    cases = [run_case(way, number, pass_s=pass_s, seconds=seconds) for way in through for number in numbers]
    publish("sleeping_engines", table, out, as_json=as_json, pass_s=pass_s, cases=cases)


if __name__ == "__main__":
    run_study(main)
