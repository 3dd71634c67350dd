"""Speed, loading and memory of everyone, alternately; and whether all compute the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from moeflow.bench.records import Record
from moeflow.cli.bench.output import show as show_table
from moeflow.planner.hardware.host import host_resources
from studies.harness.options import out_option
from studies.harness.records import recorder
from studies.peers import checking
from studies.peers.commands.options import (
    available,
    folder_option,
    formats_option,
    isa_option,
    peer_versions,
    peers_option,
    say,
    threads_option,
)
from studies.peers.contestants import FORMATS, Contestant, ours
from studies.peers.environments import NATIVE
from studies.peers.tables import pair_table, summary_table
from studies.peers.turns import CASES, Turns, weight_files


@click.command()
@folder_option
@peers_option
@formats_option
@threads_option
@isa_option
def check(folder: Path, peers: tuple[str, ...], formats: tuple[str, ...], threads: int | None, isa: str) -> None:
    """Compare everyone's log-probabilities of the likeliest tokens with those of transformers in float32."""
    contestants: list[Contestant] = []
    for weights in formats or FORMATS:
        contestants += [ours(weights, folder, isa), *available(peers, weights, folder, isa)]
    threads = threads or host_resources().num_cores
    show_table(checking.compare(contestants, folder, threads=threads, logs=folder / "logs", say=say))


@click.command()
@folder_option
@peers_option
@formats_option
@threads_option
@isa_option
@click.option("--case", "cases", type=click.Choice(tuple(CASES)), multiple=True, help="Only this row; default: all.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Turns of every case.")
@click.option("--starts", type=click.IntRange(1), default=2, show_default=True, help="Times each engine is loaded.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same prompts.")
@out_option
def measure(
    folder: Path,
    peers: tuple[str, ...],
    formats: tuple[str, ...],
    threads: int | None,
    isa: str,
    seed: int,
    out: Path | None,
    **asked: Any,
) -> None:
    """Measure decode, prefill, loading and memory of ours and all peers alternately, a format at a time.

    A peer that fails is named and left out. Without the long rows a format takes a minute on two cores.
    """
    threads = threads or host_resources().num_cores
    kept = recorder("peers", out)
    failures: list[str] = []
    for weights in formats or FORMATS:
        mine, found = ours(weights, folder, isa), available(peers, weights, folder, isa)
        if not found:
            continue
        chosen = [CASES[name] for name in asked["cases"] or CASES]
        turns = Turns([mine, *found], cases=chosen, threads=threads, seed=seed, logs=folder / "logs", say=say)
        turns.run(starts=asked["starts"], rounds=asked["rounds"])
        failures += map(str, turns.failures.values())
        for contestant in [] if mine.name in turns.failures else found:
            if contestant.name in turns.failures:
                continue
            fields = {
                "format": weights,
                "isa": isa,
                "ours": mine.name,
                "peer": contestant.name,
                "packed_beforehand": {"ours": "moeflow pack", "peer": "" if contestant.model.is_dir() else "GGUF"},
                "file_bytes": {"ours": _file_bytes(mine), "peer": _file_bytes(contestant)},
                "peer_versions": peer_versions(contestant, folder),
                "sampling": {"ours": mine.sampling, "peer": contestant.sampling},
                "read_bytes_per_s": turns.read_bytes_per_s,
                "rows": turns.pair(mine, contestant),
            }
            kept.add(fields, seed=seed, threads=threads)
    show_records(kept.records)
    for failure in failures:
        click.echo(f"error: {failure}", err=True)
    sys.exit(1 if failures or not kept.records else 0)


def _file_bytes(contestant: Contestant) -> int:
    return sum(file.stat().st_size for file in weight_files(contestant.model))


def show_records(records: list[Record]) -> None:
    """Print each pair, then ours compared with the best peer of each instruction set."""
    for record in records:
        show_table(pair_table(record))
    for isa in dict.fromkeys(record.get("isa", NATIVE) for record in records):
        show_table(summary_table([record for record in records if record.get("isa", NATIVE) == isa]))
