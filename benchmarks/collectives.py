"""Claim: ranks on one machine gather tensors faster through our shared memory than through torch.distributed's gloo.

Each rank contributes a tensor of so many bytes and gets those of all. Both ways run in the same processes, in turns,
one gathering after the other; ours allocates what it returns, gloo is given it. The table has the median of rank 0 and
the spread of the middle half. Where there are fewer cores than ranks, what is measured is mostly how soon they yield.

    python benchmarks/collectives.py --ranks 2 --ranks 4
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moeflow.core.units import format_bytes
from moeflow.parallel.shared_memory_group import SharedMemoryGroup, make_descriptor

SIZES = tuple(1 << shift for shift in range(10, 25, 2))  # bytes of each rank
MOVED_BYTES = 64 << 20  # by a rank at each size, by either way
TIMEOUT_S = 60.0

Times = dict[int, tuple[list[float], list[float]]]  # bytes -> seconds of ours, of gloo


def seconds(call: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(group: SharedMemoryGroup) -> Times:
    """Gather tensors of every size, both ways in turns."""
    times: Times = {}
    for num_bytes in SIZES:
        tensor = torch.full((num_bytes // 4,), float(group.rank))
        outs = [torch.empty_like(tensor) for _ in range(group.size)]
        ours, gloo = times[num_bytes] = ([], [])
        ways = (
            (ours, partial(group.all_gather, "rows", tensor)),
            (gloo, partial(dist.all_gather, outs, tensor)),
        )
        for turn in range(max(10, min(500, MOVED_BYTES // num_bytes))):
            for durations, call in ways:
                group.barrier("turn")
                took_s = seconds(call)
                if turn >= 3:  # memory is touched for the first time before
                    durations.append(took_s)
    return times


def run_rank(rank: int, connection: Connection, rendezvous: str) -> None:
    """Be a rank: join both groups and measure; rank 0 sends what it measured."""
    torch.set_num_threads(1)
    descriptor = reduction.recv_handle(connection)
    process_ids = connection.recv()
    group = SharedMemoryGroup(descriptor, rank, process_ids, TIMEOUT_S)
    os.close(descriptor)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=group.size)
    times = measure(group)
    dist.destroy_process_group()
    group.close()
    if rank == 0:
        connection.send(times)


def measure_ranks(num_ranks: int) -> Times:
    """Start the processes and return what rank 0 measured."""
    context = multiprocessing.get_context("spawn")
    descriptor = make_descriptor(num_ranks)
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, theirs, str(Path(folder) / "rendezvous"))
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            reduction.send_handle(ours, descriptor, process.pid)
            pipes.append(ours)
            processes.append(process)
        os.close(descriptor)
        for pipe in pipes:
            pipe.send([process.pid for process in processes])
        times: Times = pipes[0].recv()
        for process in processes:
            process.join()
    return times


def describe(durations: list[float]) -> str:
    """Return the median and half of what lies between the quartiles, in microseconds."""
    low, median, high = statistics.quantiles(durations, n=4)
    return f"{median * 1e6:.1f} ± {(high - low) / 2 * 1e6:.1f}"


@click.command(help=__doc__)
@click.option("--ranks", "counts", multiple=True, default=(2, 4), show_default=True, help="May be given several times.")
def main(counts: tuple[int, ...]) -> None:
    """Measure and print."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    table = Table("ranks", "bytes of each", "ours (us)", "gloo (us)", "gloo / ours")
    for num_ranks in track(counts, console=Console(stderr=True)):
        for num_bytes, (ours, gloo) in measure_ranks(num_ranks).items():
            ratio = statistics.median(gloo) / statistics.median(ours)
            table.add_row(str(num_ranks), format_bytes(num_bytes), describe(ours), describe(gloo), f"{ratio:.1f}")
    console = Console()
    console.print(f"{len(os.sched_getaffinity(0))} cores")
    console.print(table)


if __name__ == "__main__":
    main()
