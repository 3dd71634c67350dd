"""Claim: experts come from disk as fast as the disk reads, however few are missing, through cache and checks.

A file of packed weights, which may be one of noise that is written first, is read in random order, past the page cache,
a case after the other in many turns, so that a drift of the disk hits all alike. (A virtual machine's host may have the
file in its memory: take one that is larger.) "plain" is `preadv` of whole slabs by as many threads as there are slabs:
what the disk does if asked for so many at once; the best of these is what there is to be had, as fio's random reads of
slab size at the best depth are. "cache" is a lease on as many experts, none of them resident: a pass that is stalled on
the disk. "first" is the same right after opening the file, when every slab's checksum is compared. Shares are of the
best "plain", medians of turns.

    python -m studies.slab_reads FOLDER --slab 5.5MiB --num-slabs 200 --seconds 30
    python -m studies.slab_reads ~/.cache/moeflow/experts/big.slabs
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from moeflow.bench.tables import Table
from moeflow.checkpoint.packed.layout import SlabIndex, SlabSpec, read_slab_index
from moeflow.checkpoint.packed.reader import SlabReader
from moeflow.checkpoint.packed.writer import build_packed_weights_file
from moeflow.cli.bench.output import show
from moeflow.core.units import format_bytes, parse_bytes
from moeflow.experts.cache.eviction import FIFO
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.disk_reader import DiskReader, probe_read_depth
from moeflow.experts.slot_arena import SlotArena
from studies.harness.command import run_study

AT_ONCE = (1, 2, 4, 8, 16)
SLABS_OF_A_TURN = 32
WAYS = ("plain", "cache", "first")


def write(file: Path, spec: SlabSpec) -> SlabIndex:
    """Write slabs of noise."""
    with build_packed_weights_file(file, spec) as writer:
        for layer, expert in writer.missing():
            writer.write(layer, expert, memoryview(random.Random(expert).randbytes(spec.slab_bytes)))
    return read_slab_index(file)


class Bench:
    """A file, opened, with the ways to read it."""

    def __init__(self, index: SlabIndex, num_threads: int | None = None) -> None:
        self.spec = index.spec
        self.arena = SlotArena(max(AT_ONCE), index.spec.slab_bytes)
        self.reader = SlabReader(index, self.arena.view(0))
        self.num_threads = num_threads or probe_read_depth(self.reader, self.arena, self.arena.num_slots)
        self.disk = DiskReader(self.reader, self.arena, num_threads=self.num_threads)
        self.pool = ThreadPoolExecutor(max(AT_ONCE))

    def plain(self, numbers: list[int]) -> None:
        """Read slabs all at once."""
        places = zip(numbers, range(len(numbers)), strict=True)
        list(self.pool.map(lambda place: self.reader.fill(place[0], self.arena.view(place[1])), places))

    def make_cached(self) -> Callable[[list[int]], None]:
        """Return a function that reads them through an empty cache."""

        def read(numbers: list[int]) -> None:
            cache = ExpertCache(
                num_layers=1,
                num_experts=self.spec.num_slabs,
                num_slots=self.arena.num_slots,
                slab_bytes=self.spec.slab_bytes,
                policy=FIFO(self.spec.num_slabs),
                start_loads=self.disk.start_loads,
                wait=self.disk.wait,
            )
            self.disk.serve(cache)
            with cache.acquire(0, numbers) as lease:
                lease.wait()

        return read

    def close(self) -> None:
        """Release threads and file."""
        self.disk.close()
        self.pool.shutdown()
        self.reader.close()


def rate(bench: Bench, read: Callable[[list[int]], None], at_once: int) -> float:
    """Read the slabs of a turn and return bytes per second."""
    order = random.sample(range(bench.spec.num_slabs), SLABS_OF_A_TURN)
    start = time.perf_counter()
    for first in range(0, SLABS_OF_A_TURN, at_once):
        read(order[first : first + at_once])
    return SLABS_OF_A_TURN * bench.spec.slab_bytes / (time.perf_counter() - start)


def share(ours: list[float], best: list[float]) -> float:
    """Return ours / best of each turn, in the median."""
    return statistics.median(one / other for one, other in zip(ours, best, strict=True))


@click.command()
@click.argument("place", type=click.Path(exists=True, path_type=Path))
@click.option("--slab", default="5.5MiB", help="Size, of noise.")
@click.option("--num-slabs", default=200, help="Of noise.")
@click.option("--seconds", default=30.0)
def main(place: Path, slab: str, num_slabs: int, seconds: float) -> None:
    """Read and compare: packed weights, or noise that is written to a folder first."""
    if place.is_file():
        index = read_slab_index(place)
    else:
        names = {"identity": "noise", "weight_format": "int8", "embedding_format": "int8", "layout": "slabs only"}
        sizes = {"num_layers": 1, "num_experts": num_slabs, "slab_bytes": parse_bytes(slab), "resident_bytes": 0}
        index = write(place / "noise.slabs", SlabSpec(**names, **sizes))
    bench = Bench(index)
    rates: dict[tuple[str, int], list[float]] = {}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for at_once in AT_ONCE:
            rates.setdefault(("plain", at_once), []).append(rate(bench, bench.plain, at_once))
            rates.setdefault(("cache", at_once), []).append(rate(bench, bench.make_cached(), at_once))
            anew = Bench(index, bench.num_threads)
            rates.setdefault(("first", at_once), []).append(rate(anew, anew.make_cached(), at_once))
            anew.close()
    best = max(AT_ONCE, key=lambda at_once: statistics.median(rates["plain", at_once]))
    rows = [
        (
            f"{at_once} at once",
            *(f"{statistics.median(rates[way, at_once]) / 1e9:.2f}" for way in WAYS),
            *(f"{share(rates[way, at_once], rates['plain', best]):.0%}" for way in WAYS[1:]),
        )
        for at_once in AT_ONCE
    ]
    notes = (
        f"{len(rates['plain', 1])} turns; {bench.num_threads} threads by the probe; direct: {bench.reader.is_direct}; "
        f"{index.spec.num_slabs} slabs of {format_bytes(index.spec.slab_bytes)}",
    )
    show(
        Table("Slabs from disk, GB/s: medians", ("", *WAYS, *(f"{way} / best" for way in WAYS[1:])), tuple(rows), notes)
    )
    bench.close()
    if not place.is_file():
        index.path.unlink()


if __name__ == "__main__":
    run_study(main)
