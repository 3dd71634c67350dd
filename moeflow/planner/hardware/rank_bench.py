"""What ranks of one machine pay for sharing layers: exchanges, and the Python of a layer computed stage by stage.

Two processes with a thread each, started for it (`parallel/child_main.py`) with the descriptor of a group's memory and
their rank. They gather tensors of a few sizes, through shared memory and through encrypted links over loopback. That
measures two processes and the kernel, not a network. They also run the layers of a tiny model.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product
from typing import Final

import msgspec
import torch

from moeflow.core.errors import ConfigError, GroupError
from moeflow.core.hardware import RAM, RANK, REMOTE_RANK, Link, LinkRate, Machine, RankLayer
from moeflow.core.parallel_config import EXPERT_LAYOUTS, FORECAST_LAYOUTS, ParallelConfig
from moeflow.core.units import KIB, MIB
from moeflow.kernels.cpu import extension
from moeflow.kv.storage import KVStorage
from moeflow.models.families import qwen3_moe
from moeflow.models.layers.allocation.expert_homes import home_on_ranks
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.ranks.expert_ranks import ExpertRanks
from moeflow.models.pass_input import PassInput
from moeflow.parallel.blocks import with_kv_heads_of
from moeflow.parallel.child_processes import end_all, start_rank
from moeflow.parallel.group import Group
from moeflow.parallel.shared_memory_group import SharedMemoryGroup, make_descriptor
from moeflow.parallel.tcp.endpoint import Endpoint
from moeflow.parallel.tcp.link import Link as GroupLink
from moeflow.parallel.tcp.mesh import meet
from moeflow.parallel.tcp.tcp_group import TcpGroup
from moeflow.planner.costs.roofline import processor_of
from moeflow.planner.hardware.call_times import usual_s
from moeflow.planner.hardware.tiny_layer import tiny_shape

NUM_RANKS: Final = 2
SIZES: Final = (256, 16 * KIB, 256 * KIB, 2 * MIB)  # bytes of each rank
MOST_TIMES: Final = 200
MOST_BYTES: Final = 32 * MIB  # that each rank gives, at each size
NUM_PASSES: Final = 20
CHILLING_BYTES: Final = 8 * MIB  # that drive a layer from the caches near a core, as a large model's weights do
TIMEOUT_S: Final = 20.0
LOOPBACK: Final = "127.0.0.1"


class RankTimes(msgspec.Struct, frozen=True):
    """What was measured."""

    shared_memory: list[tuple[int, float]]  # (bytes of each rank, seconds until each has those of all)
    tcp: list[tuple[int, float]]
    layers: list[tuple[str, str, float]]  # (layout of experts, of attention, seconds of a layer)

    def added_to(self, machine: Machine) -> Machine:
        """Return a machine with these costs."""
        layers = tuple(RankLayer(expert_layout=it[0], attention_layout=it[1], seconds=it[2]) for it in self.layers)
        ram = machine.level(RAM)
        ram = replace(ram, processor=replace(processor_of(ram), rank_layers=layers))
        return replace(
            machine,
            levels=tuple(ram if level.name == RAM else level for level in machine.levels),
            links=(*machine.links, _link(RANK, self.shared_memory), _link(REMOTE_RANK, self.tcp)),
        )


def with_ranks(machine: Machine, on_step: Callable[[str], None]) -> Machine:
    """Return a machine with the known costs of ranks. Returns it unchanged if they are known or cannot be measured;
    then the planner assumes usual costs. Blocks: see `measure_ranks`.
    """
    if processor_of(machine.level(RAM)).rank_layers:
        return machine
    on_step("what ranks exchange")
    try:
        return measure_ranks().added_to(machine)
    except (ConfigError, GroupError, OSError):
        return machine


def measure_ranks() -> RankTimes:
    """Return what two ranks here measure. Blocks: for some three seconds, mostly until the processes are there.

    Raises: ConfigError where there can be no ranks; GroupError if they do not come to an end.
    """
    descriptor = make_descriptor(NUM_RANKS)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes = [start_rank("moeflow.planner.hardware.rank_bench", [descriptor], rank) for rank in range(NUM_RANKS)]
        process_ids = msgspec.json.encode([process.pid for process in processes]) + b"\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(process_ids)
            process.stdin.flush()
        assert processes[0].stdout is not None
        answer = processes[0].stdout.readline()
    except BrokenPipeError:
        answer = b""
    finally:
        os.close(descriptor)
        end_all(processes)
    if not answer:
        raise GroupError("what ranks exchange could not be measured: a process of the measurement has ended")
    return msgspec.json.decode(answer, type=RankTimes)


def measure(group: Group) -> RankTimes:
    """Return what this rank measures, while the others do the same. Raises: GroupError."""
    with _tcp_group(group) as tcp:
        return RankTimes(_gatherings(group), _gatherings(tcp), _layers(group))


def _link(target: str, times: list[tuple[int, float]]) -> Link:
    rates = (LinkRate(transfer_bytes=size, bytes_per_s=size / seconds) for size, seconds in times)
    return Link(source=RANK, target=target, rates=tuple(rates))


def _gatherings(group: Group) -> list[tuple[int, float]]:
    times = []
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        number = min(MOST_TIMES, MOST_BYTES // size)
        times.append((size, usual_s(number, lambda tensor=tensor: group.all_gather("rows", tensor))))  # type: ignore[misc]
    return times


def _layers(group: Group) -> list[tuple[str, str, float]]:
    """Return what a layer takes whose kernels have next to nothing to do, one token a pass, in each layout."""
    found: list[tuple[str, str, float]] = []
    cold = torch.ones(CHILLING_BYTES // 4)

    def chill() -> None:
        cold.sum()
        group.barrier("chilled")

    for experts, attention in product(EXPERT_LAYOUTS, FORECAST_LAYOUTS):
        parallel = ParallelConfig(
            num_ranks=group.size, expert_layout=experts, attention_layout=attention, moves_experts=False
        )
        found.append((experts, attention, usual_s(NUM_PASSES, _layer(parallel, group), chill)))
    return found


def _layer(parallel: ParallelConfig, group: Group) -> Callable[[], object]:
    """Return what computes a token in a layer of zeros."""
    shape = tiny_shape(num_experts=16, top_k=2, num_kv_heads=NUM_RANKS)
    allocator = PackedAllocator(
        torch.float32,
        torch.device("cpu"),
        WeightFormats("float32", "float32"),
        home=home_on_ranks(group, ExpertRanks.of(shape, parallel, group, range(shape.num_layers))),
        tensor_group=group if parallel.attention_layout == "tensor" else None,
    )
    model = qwen3_moe.build(shape, allocator)
    kv = KVStorage(
        layers=range(shape.num_layers),
        num_blocks=1,
        block_size=16,
        num_kv_heads=with_kv_heads_of(shape, parallel, group.rank).attention.num_kv_heads,
        head_dim=shape.attention.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    _, context = PassInput([1], [0], [1], [(0,)], [[0]]).tensors(kv, torch.device("cpu"))
    hidden = torch.zeros(1, shape.hidden_size)
    rotary = model.rotary(context.positions, hidden.dtype)
    return lambda: model.layers[0](hidden, rotary, context)


@contextmanager
def _tcp_group(group: Group) -> Iterator[TcpGroup]:
    """Yield a group of the same ranks over loopback, who learn each other's ports from the one that there is."""
    arrivals: queue.Queue[GroupLink] = queue.Queue()
    made = torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.uint8)
    token = group.all_gather("token", made)[0].numpy().tobytes()
    with closing(Endpoint(token)) as endpoint:
        port = endpoint.listen(LOOPBACK, 0, arrivals.put)
        addresses = [(LOOPBACK, int(each)) for each in group.all_gather("ports", torch.tensor([port]))]
        links = meet(group.rank, addresses, endpoint, arrivals, TIMEOUT_S)
        yield TcpGroup(group.rank, links, TIMEOUT_S)
        group.barrier("measured")


def main() -> None:
    """Entry point of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of them; who started them decides
    descriptor, rank = (int(argument) for argument in sys.argv[1:])
    line = sys.stdin.buffer.readline()
    if not line:
        return
    torch.set_num_threads(1)
    extension.set_num_threads(1)
    group = SharedMemoryGroup(descriptor, rank, msgspec.json.decode(line, type=list[int]), TIMEOUT_S)
    os.close(descriptor)
    try:
        with torch.inference_mode():
            times = measure(group)
    except GroupError as error:
        raise SystemExit(f"rank {rank}: {error}") from None
    except BaseException as error:
        group.abort(f"{type(error).__name__}: {error}")
        raise
    os.write(sys.stdout.fileno(), msgspec.json.encode(times) + b"\n")
