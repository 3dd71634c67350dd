"""Is `--memory` kept, and used? Runs `moeflow generate` or `serve` under several limits and looks at it from outside.

    python -m studies.memory_budget [MODEL] [--limits 700MiB,1GiB] [--formats bfloat16,int4] [--serve] [--enforce]

For each run it prints the peak RAM of all processes (shared memory counts for each) and its share of the limit. As
root, it also prints the peak charge of a control group, page cache included. With --enforce the group has moeflow's
limit, and kills a process that needs more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.errors import ConfigError
from moeflow.core.units import format_bytes, parse_bytes
from studies.harness.command import run_study
from studies.harness.memory_limit import MemoryLimit
from studies.harness.options import short_name
from studies.harness.records import publish

PERIOD_S = 0.02
PROMPT = "The quick brown fox jumps over the lazy dog. " * 90  # about 900 tokens: two chunks of prompt
NUM_TOKENS = 64


@dataclass
class Peak:
    """What a tree of processes held at most."""

    rss_bytes: int = 0
    group_bytes: int | None = None
    by_process: dict[int, int] = field(default_factory=dict)


@contextmanager
def group_or_none(limit_bytes: int | None) -> Iterator[MemoryLimit | None]:
    """Make a group that counts memory, where the system permits one."""
    try:
        group = MemoryLimit("budget", limit_bytes)
    except ConfigError:
        yield None
        return
    with group:
        yield group


def tree(root: int) -> list[int]:
    """Return a process and all that it started."""
    try:
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    except psutil.Error:
        return [root]


def field_bytes(process: int, name: str) -> int:
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


@contextmanager
def watched(
    command: list[str], group: MemoryLimit | None, **options: object
) -> Iterator[tuple[subprocess.Popen[str], Peak]]:
    """Run a command and take down what it and its children hold; the peak is complete when the block ends."""
    peak, is_over = Peak(), threading.Event()
    prefix = () if group is None else group.prefix
    process = subprocess.Popen([*prefix, *command], text=True, **options)  # type: ignore[call-overload]

    def watch() -> None:
        while not is_over.wait(PERIOD_S):
            here = tree(process.pid)
            for one in here:
                peak.by_process[one] = max(peak.by_process.get(one, 0), field_bytes(one, "VmHWM"))
            peak.rss_bytes = max(peak.rss_bytes, sum(field_bytes(one, "VmRSS") for one in here))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield process, peak
    finally:
        process.wait()
        is_over.set()
        thread.join()
        if group is not None:
            peak.group_bytes = group.peak_bytes


def generate(moeflow: list[str], overrides: list[str], group: MemoryLimit | None) -> tuple[Peak, str]:
    asked = ["-p", PROMPT, "--max-tokens", str(NUM_TOKENS), "--temperature", "0", "--json", "--stats"]
    command = [*moeflow, "generate", *overrides, *asked]
    with watched(command, group, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as (process, peak):
        _, err = process.communicate()
    if process.returncode:
        return peak, f"exit code {process.returncode}: {err.strip().splitlines()[-1:]}"
    return peak, err.strip().splitlines()[-1]


def serve(moeflow: list[str], overrides: list[str], group: MemoryLimit | None) -> tuple[Peak, str]:
    command = [*moeflow, "serve", *overrides, "--port", "0"]
    with watched(command, group, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as (process, peak):
        line = (process.stdout.readline() if process.stdout else "").strip()
        if not line:
            return peak, f"exit code {process.wait()}"
        address = line.rsplit(" ", 1)[1]
        threads = [threading.Thread(target=ask, args=(address, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with urllib.request.urlopen(f"{address}/stats") as answer:
            stats = json.load(answer)
        process.terminate()
    held = stats.get("stats", stats)
    return peak, f"{held.get('experts_in_slots')} of {held.get('experts_on_disk')} experts in memory at the end"


def ask(address: str, number: int) -> None:
    body = {"prompt": f"{number}. {PROMPT}", "max_tokens": NUM_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).read()


def run(model: str | None, weight_format: str, limit_bytes: int, is_served: bool, is_enforced: bool) -> dict[str, Any]:
    """Run one format under one limit; return the memory that was held."""
    overrides = [*([model] if model else []), f"--memory={limit_bytes}"]
    overrides += ["--dtype=bfloat16"] if weight_format == "bfloat16" else [f"--quantize={weight_format}"]
    moeflow = [str(Path(sys.executable).with_name("moeflow"))]
    with group_or_none(limit_bytes if is_enforced else None) as group:
        peak, at_end = (serve if is_served else generate)(moeflow, overrides, group)
    return {
        "weight_format": weight_format,
        "limit_bytes": limit_bytes,
        "peak_bytes": max(peak.rss_bytes, max(peak.by_process.values(), default=0)),
        "charged_bytes": peak.group_bytes,
        "at_end": at_end,
    }


@click.command(help=__doc__)
@click.argument("model", required=False)
@click.option("--limits", default="700MiB,900MiB,1200MiB", show_default=True)
@click.option("--formats", default="bfloat16,int8,int4", show_default=True)
@click.option("--serve", "is_served", is_flag=True, help="Serve instead of generate.")
@click.option("--enforce", "is_enforced", is_flag=True, help="Kill what goes above the limit.")
@result_options
def main(
    model: str | None, limits: str, formats: str, is_served: bool, is_enforced: bool, as_json: bool, out: Path | None
) -> None:
    """Run each format under each limit; exit with 1 if one was not kept."""
    runs = []
    for weight_format in formats.split(","):
        for limit in limits.split(","):
            runs.append(run(model, weight_format, parse_bytes(limit), is_served, is_enforced))
            click.echo(f"{weight_format}, {limit}: {runs[-1]['at_end']}", err=True)
    publish(
        "memory_budget",
        table,
        out,
        as_json=as_json,
        model=short_name(model),
        verb="serve" if is_served else "generate",
        is_enforced=is_enforced,
        runs=runs,
    )
    if max(map(share, runs)) > 1:
        raise SystemExit(1)


def share(run: dict[str, Any]) -> float:
    """Return the most that a run held as a share of its limit."""
    return float(run["peak_bytes"] / run["limit_bytes"])


def table(record: Record) -> Table:
    """Return what each run held at most."""
    rows = [
        (
            f"{run['weight_format']}, {format_bytes(run['limit_bytes'])}",
            format_bytes(run["peak_bytes"]),
            f"{share(run):.1%}",
            "" if run["charged_bytes"] is None else format_bytes(run["charged_bytes"]),
        )
        for run in record["runs"]
    ]
    note = (
        "Peak: RAM that all processes held, shared parts counted for each. Charged: page cache included, by the system."
    )
    if record["is_enforced"]:
        note += " The system would have killed what went above the limit."
    title = f"`--memory` from outside: {record['model']}, `moeflow {record['verb']}`"
    return Table(title, ("format, limit", "peak", "of the limit", "charged"), tuple(rows), (note,))


if __name__ == "__main__":
    run_study(main)
