"""Claim: going back and forth between the kernels' pool and torch's operations costs nothing measurable.

Times two loops of a dense layer of the extension followed by a torch operation: alternately (A, B, A, B, ...), and each
in a row of its own (A, A, ..., B, B, ...). What a turn costs beyond its parts is the price of alternating. All three
run interleaved, round by round; the table has the median round and the spread of the middle half.

    python -m studies.pool_and_torch --num-threads 2
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import click
import torch

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import show
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedWeight
from studies.harness.command import run_study
from studies.harness.interleaved import measure_interleaved, microseconds_text, seconds

TURNS = 200  # of a round, some milliseconds


def loop_s(*calls: Callable[[], object]) -> float:
    """Time the calls one after the other, TURNS times over, for one of the TURNS."""

    def loop() -> None:
        for _ in range(TURNS):
            for call in calls:
                call()

    return seconds(loop) / TURNS


@click.command(help=__doc__)
@click.option("--num-threads", default=2, show_default=True, help="Of the pool.")
@click.option("--torch-threads", default=1, show_default=True, help="Of torch; the engine sets 1.")
@click.option("--rounds", default=30, show_default=True)
def main(num_threads: int, torch_threads: int, rounds: int) -> None:
    """Measure and print."""
    torch.set_num_threads(torch_threads)
    extension.set_num_threads(num_threads)
    found: list[tuple[str, ...]] = []
    weight = PackedWeight.pack(torch.randn(1024, 1024), "bfloat16")
    for rows in (1, 32):
        pool_call = partial(extension.linear, torch.randn(rows, 1024), weight)
        operations = {
            "rms_norm": partial(torch.rms_norm, torch.randn(rows, 1024), (1024,)),
            "softmax": partial(torch.softmax, torch.randn(rows, 32_000), dim=-1),
        }
        for name, torch_call in operations.items():
            arms = {"pool": (pool_call,), "torch": (torch_call,), "both": (pool_call, torch_call)}
            loops = {arm: partial(loop_s, *calls) for arm, calls in arms.items()}
            pool, alone, turns = measure_interleaved(loops, rounds, warm_ups=0).values()
            price = [both - a - b for a, b, both in zip(pool, alone, turns, strict=True)]
            found.append((f"{rows} rows, {name}", *map(microseconds_text, (pool, alone, turns, price))))
    title = f"Microseconds: {extension.isa_name()}, {num_threads} threads, torch {torch_threads}"
    show(Table(title, ("", "pool alone", "torch alone", "in turns", "price of a turn"), tuple(found)))


if __name__ == "__main__":
    run_study(main)
