"""Claim: of a layer that a GPU shares with the CPU, the host's own part takes a few microseconds.

No GPU takes part: the exchange's buffers are in main memory, and a copy raises the flag before the host looks. The
least is one look at a raised flag, through the binding to C++. The flag's way between two processors is that of another
process, there and back. What a GPU adds is measured by `scripts/gpu-check hybrid --only seam`.

    python -m studies.seam_host
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Final

import click
import numpy as np
import torch
from numpy.typing import NDArray

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, threads_text
from moeflow.cli.bench.output import result_options
from moeflow.experts.hybrid.lanes import SerialLanes
from moeflow.experts.hybrid.seam import Seam
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.device_flag import DeviceFlag
from moeflow.kernels.cpu.expert_slots import PresentExperts
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.planner.hardware.host import host_resources
from studies.harness.command import run_study
from studies.harness.records import publish

HIDDEN, TOP_K, WIDTH = 2048, 8, 32  # hidden states and choices of Qwen3-30B-A3B; of an expert that costs nothing
LEAST: Final = "look at a raised flag"
_WAIT_S: Final = 10.0
_START_S: Final = 60.0


def microseconds(calls: int, prepare: Callable[[], object], call: Callable[[], object]) -> list[float]:
    """Return the times of a call, each after a preparation that does not count."""
    times = []
    for _ in range(calls):
        prepare()
        start = perf_counter()
        call()
        times.append(1e6 * (perf_counter() - start))
    return times


def of_flag(calls: int) -> list[float]:
    """Return the times of a look at a raised flag."""
    flag = DeviceFlag(torch.ones(1, dtype=torch.int64))
    return microseconds(calls, lambda: None, lambda: flag.wait(_WAIT_S))


def of_layer(calls: int, batch: int, num_present: int) -> list[float]:
    """Return the times of the host's part of a layer with so many experts on the CPU: 0, or 1 that all choose."""
    seam = Seam(SerialLanes(), torch.device("cpu"), batch, HIDDEN, TOP_K)
    seam.num_tokens = batch
    table = np.array([0 if num_present else -1], np.int32)
    experts = PresentExperts(PackedExperts(1, HIDDEN, WIDTH, "bfloat16"), table)
    hidden, ids = torch.zeros(batch, HIDDEN), torch.zeros(batch, TOP_K, dtype=torch.int64)
    weights, seen = torch.zeros(batch, TOP_K), list[object]()

    def see(choices: NDArray[np.int64]) -> None:
        seen[:] = [choices.copy()]

    return microseconds(calls, lambda: seam.send(hidden, ids, weights), lambda: seam.compute(0, experts, batch, see))


def of_two_processes(calls: int) -> list[float]:
    """Return the times of a flag to another process: halves of the way there and back."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "flags"
        np.zeros(2, np.int64).tofile(file)
        words, _, back = _flags(file)
        process = multiprocessing.get_context("spawn").Process(target=answer, args=(file, calls), daemon=True)
        process.start()
        if not back.wait(_START_S):
            raise TimeoutError("the other process does not start")

        def there_and_back() -> None:
            words[0] = 1
            assert back.wait(_WAIT_S), "the other process has ended"

        times = microseconds(calls, back.lower, there_and_back)
        process.join(_WAIT_S)
    return [each / 2 for each in times]


def answer(file: Path, calls: int) -> None:
    """Raise a flag once as the start, then whenever the other one is raised."""
    words, there, _ = _flags(file)
    words[1] = 1
    for _ in range(calls):
        if not there.wait(_WAIT_S):
            break
        there.lower()
        words[1] = 1


def _flags(file: Path) -> tuple[NDArray[np.int64], DeviceFlag, DeviceFlag]:
    """Return two flags in memory that processes share, and the memory."""
    words = np.memmap(file, np.int64, "r+", shape=(2,))
    there, back = (DeviceFlag(torch.from_numpy(words[place : place + 1])) for place in range(2))
    return words, there, back


@click.command(help=__doc__)
@click.option("--calls", type=click.IntRange(2), default=5000, show_default=True, help="Measurements of each row.")
@result_options
def main(calls: int, as_json: bool, out: Path | None) -> None:
    """Measure, and print the table."""
    num_threads = host_resources().num_cores
    extension.set_num_threads(num_threads)
    found = {LEAST: of_flag(calls)}
    for batch in (1, 16):
        found[f"a layer without experts, batch {batch}"] = of_layer(calls, batch, 0)
    found["a layer with an expert, which wakes all threads, batch 1"] = of_layer(calls, 1, 1)
    found["a flag from another process"] = of_two_processes(calls)
    rows = {name: [round(each, 3) for each in statistics.quantiles(times, n=10)] for name, times in found.items()}
    least = {name: round(min(times), 3) for name, times in found.items()}
    publish("seam_host", table, out, as_json=as_json, threads=num_threads, deciles_us=rows, least_us=least)


def table(record: Record) -> Table:
    """Return the least, median and slow times of each row, and their ratio to the shortest row."""
    shortest_us = record["deciles_us"][LEAST][4]
    rows = tuple(
        (
            name,
            f"{record['least_us'][name]:.2f}",
            *(f"{deciles[place]:.2f}" for place in (4, 8)),
            f"{deciles[4] / shortest_us:.1f}",
        )
        for name, deciles in record["deciles_us"].items()
    )
    columns = ("the host's part, us", "least", "median", "90%", "/ least")
    return Table(f"A layer's exchange, {threads_text(record)}", columns, rows, (f"The least is: {LEAST}.",))


if __name__ == "__main__":
    run_study(main)
