"""Claim: ranks on one machine gather tensors faster through our shared memory than through torch.distributed's gloo.
Encrypted links between machines cost more than plain sockets: some Python for each collective, and for large tensors
the encryption of each byte at either end.

Each rank contributes a tensor of so many bytes and gets those of all. All ways run in the same processes, alternately,
one gathering after the other; ours allocate what they return, gloo is given it. TCP is loopback's: what is measured is
what processes and kernel do, not a network. "There and back" is between the first two ranks, who send nothing at once.
The table has the median of rank 0 and the spread of the middle half. Where there are fewer cores than ranks, what is
measured is mostly how soon they yield.

    python -m studies.collectives --ranks 2 --ranks 4
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import tempfile
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

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import show
from moeflow.core.units import format_bytes
from moeflow.parallel.shared_memory_group import SharedMemoryGroup, make_descriptor
from moeflow.parallel.tcp.endpoint import Endpoint
from moeflow.parallel.tcp.link import Link
from moeflow.parallel.tcp.mesh import meet
from moeflow.parallel.tcp.tcp_group import TcpGroup
from studies.harness.command import run_study
from studies.harness.interleaved import measure_interleaved, microseconds_text, seconds

SIZES = tuple(1 << shift for shift in range(10, 25, 2))  # bytes of each rank
MOVED_BYTES = 64 << 20  # by a rank at each size, by either way
TIMEOUT_S = 60.0

TOKEN = b"for benchmarks of one machine"
WAYS = ("shared memory", "TCP", "there and back", "gloo")
Times = dict[int, dict[str, list[float]]]  # bytes -> way -> seconds


def there_and_back(connection: socket.socket | None, rank: int, sent: memoryview, received: memoryview) -> None:
    """Send bytes to the other rank and get as many back; other ranks than the first two do nothing."""
    if connection is None:
        return
    if rank == 0:
        connection.sendall(sent)
    num_left = len(received)
    while num_left:
        num_left -= connection.recv_into(received[-num_left:])
    if rank == 1:
        connection.sendall(sent)


def measure(group: SharedMemoryGroup, tcp: TcpGroup, plain: socket.socket | None) -> Times:
    """Gather tensors of every size, alternating between all ways."""
    times: Times = {}
    for num_bytes in SIZES:
        tensor = torch.full((num_bytes // 4,), float(group.rank))
        outs = [torch.empty_like(tensor) for _ in range(group.size)]
        buffers = memoryview(bytearray(num_bytes)), memoryview(bytearray(num_bytes))
        calls = (
            partial(group.all_gather, "rows", tensor),
            partial(tcp.all_gather, "rows", tensor),
            partial(there_and_back, plain, group.rank, *buffers),
            partial(dist.all_gather, outs, tensor),
        )
        arms = {way: partial(timed, group, call) for way, call in zip(WAYS, calls, strict=True)}
        times[num_bytes] = measure_interleaved(arms, max(7, min(500, MOVED_BYTES // num_bytes)), warm_ups=3)
    return times


def timed(group: SharedMemoryGroup, call: Callable[[], object]) -> float:
    """Time a call that all ranks begin at the same time."""
    group.barrier("turn")
    return seconds(call)


def plain_connection(rank: int, connection: Connection) -> socket.socket | None:
    """Connect the first two ranks without anything above TCP."""
    if rank > 1:
        return None
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            connection.send(listener.getsockname())
            plain, _ = listener.accept()
    else:
        plain = socket.create_connection(connection.recv())
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plain


def run_rank(rank: int, connection: Connection, rendezvous: str) -> None:
    """Run a rank: join all groups and measure; rank 0 sends the measurements."""
    torch.set_num_threads(1)
    descriptor = reduction.recv_handle(connection)
    process_ids = connection.recv()
    group = SharedMemoryGroup(descriptor, rank, process_ids, TIMEOUT_S)
    os.close(descriptor)
    arrivals: queue.Queue[Link] = queue.Queue()
    endpoint = Endpoint(TOKEN)
    connection.send(("127.0.0.1", endpoint.listen("127.0.0.1", 0, arrivals.put)))
    addresses = connection.recv()
    tcp = TcpGroup(rank, meet(rank, addresses, endpoint, arrivals, TIMEOUT_S), TIMEOUT_S)
    plain = plain_connection(rank, connection)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=group.size)
    times = measure(group, tcp, plain)
    dist.destroy_process_group()
    group.close()
    endpoint.close()
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
        addresses = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
        pipes[1].send(pipes[0].recv())  # where the first two connect without anything above TCP
        times: Times = pipes[0].recv()
        for process in processes:
            process.join()
    return times


@click.command(help=__doc__)
@click.option(
    "--ranks",
    "counts",
    multiple=True,
    type=click.IntRange(2),
    default=(2, 4),
    show_default=True,
    help="May be given several times.",
)
def main(counts: tuple[int, ...]) -> None:
    """Measure and print."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rows = []
    for num_ranks in track(counts, console=Console(stderr=True)):
        for num_bytes, times in measure_ranks(num_ranks).items():
            texts = (microseconds_text(times[way]) for way in WAYS)
            rows.append((f"{num_ranks} ranks, {format_bytes(num_bytes)} of each", *texts))
    show(Table(f"Microseconds, {len(os.sched_getaffinity(0))} cores", ("", *WAYS), tuple(rows)))


if __name__ == "__main__":
    run_study(main)
