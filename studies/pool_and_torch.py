"""Claim: going back and forth between the kernels' pool and torch's operations costs nothing measurable.

Times two loops of a dense layer of the extension followed by a torch operation: in turns (A, B, A, B, ...), and each
in a row of its own (A, A, ..., B, B, ...). What a turn costs beyond its parts is the price of alternating. All three
run interleaved, round by round; the table has the median round and the spread of the middle half.

    python -m studies.pool_and_torch --num-threads 2
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import click
import torch
from rich.console import Console
from rich.table import Table

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedWeight
from studies.harness.command import run_study

TURNS = 200  # of a round, some milliseconds


def microseconds_a_turn(*calls: Callable[[], object]) -> float:
    """Time the calls one after the other, TURNS times over."""
    start = time.perf_counter()
    for _ in range(TURNS):
        for call in calls:
            call()
    return (time.perf_counter() - start) / TURNS * 1e6


def measure(pool_call: Callable[[], object], torch_call: Callable[[], object], rounds: int) -> list[list[float]]:
    """Return the times of each round: pool alone, torch alone, in turns."""
    loops = [(pool_call,), (torch_call,), (pool_call, torch_call)]
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for loop, results in zip(loops, times, strict=True):
            results.append(microseconds_a_turn(*loop))
    return times


def describe(times: list[float]) -> str:
    """Return the median and half of what lies between the quartiles."""
    low, median, high = statistics.quantiles(times, n=4)
    return f"{median:.1f} ± {(high - low) / 2:.1f}"


@click.command(help=__doc__)
@click.option("--num-threads", default=2, show_default=True, help="Of the pool.")
@click.option("--torch-threads", default=1, show_default=True, help="Of torch; the engine sets 1.")
@click.option("--rounds", default=30, show_default=True)
def main(num_threads: int, torch_threads: int, rounds: int) -> None:
    """Measure and print."""
    torch.set_num_threads(torch_threads)
    extension.set_num_threads(num_threads)
    table = Table("rows", "torch operation", "pool alone", "torch alone", "in turns", "price of a turn")
    weight = PackedWeight.pack(torch.randn(1024, 1024), "bfloat16")
    for rows in (1, 32):
        pool_call = partial(extension.linear, torch.randn(rows, 1024), weight)
        operations = {
            "rms_norm": partial(torch.rms_norm, torch.randn(rows, 1024), (1024,)),
            "softmax": partial(torch.softmax, torch.randn(rows, 32_000), dim=-1),
        }
        for name, torch_call in operations.items():
            pool, alone, turns = measure(pool_call, torch_call, rounds)
            price = [both - a - b for a, b, both in zip(pool, alone, turns, strict=True)]
            table.add_row(str(rows), name, *(describe(times) for times in (pool, alone, turns, price)))
    console = Console()
    console.print(f"{extension.isa_name()}, {num_threads} threads, torch {torch_threads}; microseconds")
    console.print(table)


if __name__ == "__main__":
    run_study(main)
