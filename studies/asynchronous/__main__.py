"""Claim: without barriers, devices that share experts idle less. In which settings are they faster, too?

    python -m studies.asynchronous
    python -m studies.asynchronous --batch-size 512 --by-load

Devices are processes with real messages. Each sleeps for the time that a T4 would need, times --scale, so devices may
outnumber cores. Each has several batches of a model of GPT-MoE's sizes (ExpertFlow 3.2). Forms:

- synchronous, batch by batch: A device computes one batch at a time. Each layer ends with a barrier (figure 3.2).
- synchronous, all batches as one: One batch has all tokens, so weights are read once.
- asynchronous, each batch apart: A task begins when its inputs are there (figure 3.3). Each batch reads the weights.
- asynchronous, batches merged: Attention comes first. One task then takes all tokens that wait for a layer's experts.
- asynchronous, batches merged for each expert: A task is one expert. Tokens that come meanwhile join at later experts.
- asynchronous, batches merged in two halves: There are two batches, each with half of the tokens.

All forms must give the bits of one loop over tokens. Hot experts, a tenth, are on another device in each layer, or with
--lasting on the first device. The floor is the work of the slowest device if it reads weights once, without waits.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.units import format_seconds
from studies.asynchronous.case import Case, Shape, Speeds
from studies.asynchronous.device import FORMS, Went
from studies.harness.children import Children
from studies.harness.command import run_study
from studies.harness.interleaved import measure_interleaved
from studies.harness.records import publish

DIVIDED: Final = "synchronous, all batches as one"  # that others are compared with


@contextmanager
def devices(case: Case) -> Iterator[Children]:
    """Start the processes."""
    with tempfile.TemporaryDirectory() as folder, Children() as children:
        for number in range(case.num_devices):
            children.start([sys.executable, "-m", "studies.asynchronous.device", folder, str(number)])
        children.tell(case)
        yield children


def expected(case: Case) -> list[str]:
    """Return the digest of each device's batches, computed token by token."""
    every = case.num_devices
    return [
        hashlib.sha256(
            b"".join(case.alone(batch).tobytes() for batch in range(device, case.num_batches * every, every))
        ).hexdigest()
        for device in range(every)
    ]


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Return what each form took. Raises: ClickException if results are not those of one loop."""
    with devices(case) as children:
        runs = measure_interleaved({form: partial(children.ask, form, Went) for form in FORMS}, repeats, warm_ups=0)
    want = expected(case)
    for form, found in runs.items():
        if any([went.digest for went in each] != want for each in found):
            raise click.ClickException(f"{form}: results differ from those of one loop")
    forms = {
        form: [
            {
                "wall_s": max(went.wall_s for went in each),
                "idle": statistics.mean(1 - went.busy_s / went.wall_s for went in each),
                "num_tasks": sum(went.num_tasks for went in each),
            }
            for each in found
        ]
        for form, found in runs.items()
    }
    return {"case": msgspec.to_builtins(case), "floor_s": case.least_s(), "forms": forms}


def describe(case: dict[str, Any]) -> str:
    """Return what tells a case from others."""
    skew = "lasting" if case["is_lasting"] else "changing"
    placed = "by load" if case["by_load"] else "by index"
    link_us = case["speeds"]["link_s"] * 1e6
    return f"{case['batch_size']} tokens a batch, {skew} skew {case['skew']:g}, {placed}, link {link_us:.0f} us"


def table(record: Record) -> Table:
    """Return times, ratios and idle shares of all forms."""
    found = []
    for row in record["cases"]:
        base = [it["wall_s"] for it in row["forms"][DIVIDED]]
        for form, runs in row["forms"].items():
            walls = [it["wall_s"] for it in runs]
            ratios = [mine / other for mine, other in zip(base, walls, strict=True)]
            found.append(
                (
                    describe(row["case"]),
                    form,
                    format_seconds(statistics.median(walls)),
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                    f"{statistics.median(it['idle'] for it in runs):.0%}",
                    f"{statistics.median(it['num_tasks'] for it in runs):.0f}",
                    format_seconds(row["floor_s"]),
                )
            )
    case = record["cases"][0]["case"]
    title = f"{case['num_devices']} devices, {case['num_batches']} batches each, {case['shape']['num_layers']} layers"
    columns = ("", "form", "pass", "speed-up", "idle", "tasks of experts", "floor")
    return Table(title, columns, tuple(found), (f"speed-up: over {DIVIDED}; median of rounds, from and to",))


@click.command(context_settings={"show_default": True})
@click.option("--devices", "num_devices", type=click.IntRange(2), default=4)
@click.option("--batches", type=click.IntRange(2), default=4, help="Of a device.")
@click.option("--batch-size", "sizes", type=click.IntRange(1), multiple=True, default=(4, 64, 512), help="Tokens.")
@click.option("--layers", type=click.IntRange(1), default=6)
@click.option("--top-k", type=click.IntRange(1), default=1)
@click.option("--skew", type=click.FloatRange(0, 1), default=0.6)
@click.option("--lasting", "is_lasting", is_flag=True, help="Hot experts are on the first device in all layers.")
@click.option("--by-load", is_flag=True, help="Place experts by the loads of other batches.")
@click.option("--link-us", default=20.0, help="Microseconds of a message without its bytes.")
@click.option("--link-gb", default=10.0, help="GB/s of a link.")
@click.option("--scale", default=20.0, help="Seconds for each second of the devices.")
@click.option("--repeats", type=click.IntRange(1), default=3)
@click.option("--seed", default=0)
@result_options
def main(
    num_devices: int,
    batches: int,
    sizes: tuple[int, ...],
    layers: int,
    top_k: int,
    skew: float,
    is_lasting: bool,
    by_load: bool,
    link_us: float,
    link_gb: float,
    scale: float,
    repeats: int,
    seed: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Run all forms alternately on the same routing."""
    cases = [
        Case(
            shape=Shape(num_layers=layers, top_k=top_k),
            speeds=Speeds(link_s=link_us * 1e-6, link_bytes_per_s=link_gb * 1e9),
            num_devices=num_devices,
            num_batches=batches,
            batch_size=size,
            skew=skew,
            is_lasting=is_lasting,
            by_load=by_load,
            scale=scale,
            seed=seed,
        )
        for size in sizes
    ]
    found = [measure(case, repeats) for case in cases]
    publish("asynchronous", table, out, as_json=as_json, seed=seed, cases=found)


if __name__ == "__main__":
    run_study(main)
