"""`moeflow chaos`: kills, stops, cuts and fills parts of a test deployment, and checks all of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path

import click
import httpx

from moeflow.bench.records import make_record
from moeflow.cli import lazy
from moeflow.cli.api_key import api_key_option
from moeflow.cli.bench.output import keep, repeated_command, result_options, show
from moeflow.cli.chaos.deployment import Nodes, cluster
from moeflow.cli.chaos.faults import NAMES, Scene, choose_faults
from moeflow.cli.chaos.processes import Processes, find_processes
from moeflow.cli.chaos.proxy import Proxy
from moeflow.cli.chaos.rounds import Load, Rounds, Row, fields
from moeflow.cli.chaos.table import chaos_table
from moeflow.cli.progress import bar
from moeflow.core.errors import ConfigError
from moeflow.core.loopback import is_loopback_name

EPILOG = f"""\b
Examples:
  moeflow chaos --cluster
      a test deployment of the built-in model, with two nodes
  moeflow chaos --cluster --ranks 2 --faults rank-killed,rank-stopped
  moeflow chaos http://127.0.0.1:8000 --yes --rounds 3
      a test server on this machine: its processes are killed

Faults: {NAMES}.

Streams, small requests and a batch job run during each fault. Every answer must equal that of calm times. Refusals
must have status 503 or 429 and Retry-After. The exit code is 1 if a fault violates that.

Stopped processes and lowered limits are restored in the end, also after Ctrl-C."""


@click.command(epilog=EPILOG, context_settings={"show_default": True})
@click.argument("url", required=False)
@click.option("--cluster", "own", is_flag=True, help="Start a test deployment here, and end it afterwards.")
@click.option("--model", help="Its model, with --cluster.  [default: the built-in model]")
@click.option("--replicas", type=click.IntRange(1), default=2, help="Its engines, each on a node, with --cluster.")
@click.option("--ranks", type=click.IntRange(1), default=1, help="Instead, ranks of one engine, with --cluster.")
@click.option("--faults", default="", metavar="LIST", help="Faults, with commas.  [default: all that are possible]")
@click.option("--rounds", type=click.IntRange(1, 100), default=1, help="How often each fault happens.")
@click.option("--duration", type=click.FloatRange(0.1, 600), default=15.0, help="Seconds of a fault that has an end.")
@click.option("--seed", default=0, help="Of targets, moments and requests.")
@click.option("--streams", type=click.IntRange(1, 256), default=8, help="Clients that stream all the time.")
@click.option("--tokens", type=click.IntRange(4, 4096), default=128, help="Of each stream.")
@click.option("--batch-lines", type=click.IntRange(0, 10_000), default=16, help="Of the batch job; 0: none.")
@click.option("--yes", is_flag=True, help="Do not ask before processes of the server are killed.")
@api_key_option("The server's key.")
@result_options
def chaos(
    url: str | None,
    own: bool,
    model: str | None,
    replicas: int,
    ranks: int,
    faults: str,
    rounds: int,
    duration: float,
    seed: int,
    streams: int,
    tokens: int,
    batch_lines: int,
    yes: bool,
    api_key: str | None,
    as_json: bool,
    out: Path | None,
) -> int:
    """Kill, stop, cut and fill parts of a test deployment, and check that all answers are complete and equal.

    URL is a test server on this machine. Without it, --cluster starts one.
    """
    if bool(url) is own:
        raise click.UsageError("give either the URL of a test server, or --cluster")
    load = Load(streams, tokens, duration, batch_lines, seed, api_key)
    names = [name.strip() for name in faults.split(",") if name.strip()]
    rows: list[Row] = []
    with contextlib.ExitStack() as undo:
        if url is None:
            nodes: Nodes | None
            server, nodes = undo.enter_context(cluster(model, replicas, ranks))
            url, processes = server.url, server.processes
        else:
            url, nodes = _own_address(url), None
            processes = find_processes(_port(url))
            _confirm(processes, yes)
        scene = _scene(processes, _port(url), nodes, seed, undo)
        try:
            asyncio.run(_run(Rounds(scene, url, load), names, rounds, rows, nodes))
        finally:  # Ctrl-C, too
            if rows:
                _report(rows, seed, as_json=as_json, out=out)
    return int(not all(row.is_good for row in rows))


def _report(rows: list[Row], seed: int, *, as_json: bool, out: Path | None) -> None:
    record = make_record("chaos", repeated_command(), seed=seed, threads=None, rows=[fields(row) for row in rows])
    keep(record, out, as_json=as_json)
    if not as_json:
        show(chaos_table(record))


async def _run(rounds: Rounds, names: Sequence[str], number: int, rows: list[Row], nodes: Nodes | None) -> None:
    """Run faults one after the other; without the server's process, no more."""
    async with rounds:
        await rounds.learn()
        faults = choose_faults(names, rounds.scene) * number  # helpers start with the first request that needs them
        with bar(len(faults)) as shown:
            for fault in faults:
                shown.say(fault.name)
                rows.append(await rounds.run(fault, nodes.restore if nodes else lambda: None))
                shown.advance()
                if not rounds.scene.processes.server.is_running():
                    return


def _scene(processes: Processes, port: int, nodes: Nodes | None, seed: int, undo: contextlib.ExitStack) -> Scene:
    front = undo.enter_context(contextlib.closing(Proxy(port)))
    scene = Scene(processes, front, port, random.Random(seed), None if nodes is None else nodes.network)
    undo.callback(scene.undo.close)
    return scene


def _own_address(url: str) -> str:
    """Return the address of a server on this machine. Raises: ConfigError for another one."""
    address = lazy.check_address(url, allow_remote=True)
    host = httpx.URL(address).host
    if not is_loopback_name(host):
        raise ConfigError(f"{host} is not a loopback address: start the test server at 127.0.0.1, and run this there")
    return address


def _port(url: str) -> int:
    parsed = httpx.URL(url)
    return parsed.port or (443 if parsed.scheme == "https" else 80)


def _confirm(processes: Processes, yes: bool) -> None:
    """Ask before anything is killed. Raises: click.Abort."""
    found = ", ".join(f"{role} {process.pid}" for role, process in processes.all())
    if not yes:
        click.confirm(f"Kill, stop and limit these processes of a test server: {found}?", abort=True, err=True)
