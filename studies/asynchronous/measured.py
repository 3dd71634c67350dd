"""Claim: where devices share experts and routing is skewed, they idle half as long without barriers as with them.

A device is a process with one thread, on a core of its own. Each has batches of decoding tokens and some of every
layer's experts; a layer is a dense product in the place of attention, then the experts that a skewed router chooses.

- synchronous: one batch a device at a time; three collectives a layer through shared memory carry rows and choices to
  experts and results back, and each waits for all devices. There is no barrier besides.
- asynchronous: all batches of a device at once, by the service of `moeflow serve --expert-parallel`; each piece of work
  is computed when it arrives. One batch a device is what a replica runs.

Beside each stands the prediction of `python -m studies.asynchronous` for the same routing. Its devices are as fast as
these were in the synchronous form, and their messages cost nothing.

Both compute the same batches; results are compared, to the bit. A device is busy while its process has processor time,
with all that messages take; else it idles. Hot experts are the first of every layer (lasting skew: one device has most
to do, which only placement can change), or the first and the last of layers in turn (changing skew).

    python -m studies.asynchronous.measured
    python -m studies.asynchronous.measured --skew 0.9 --batches 8 --trace async.json
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import numpy as np
import torch
from torch import Tensor

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import show
from moeflow.core.attention_config import RopeConfig
from moeflow.core.hardware import RAM, MemoryLevel, Processor
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import format_seconds
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.models.layers.expert_shares import ExpertShares
from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.parallel.remote import expert_service
from moeflow.parallel.remote.expert_peers import ExpertPeers, MeetingPlace
from moeflow.parallel.remote.expert_service import ExpertService
from moeflow.parallel.shared_memory_group import SharedMemoryGroup, make_descriptor
from moeflow.pipeline.runtime.perfetto import write_perfetto
from moeflow.pipeline.runtime.trace import Label, Trace, TraceRow
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from studies.asynchronous.inflight_run import InFlight, InFlightRun
from studies.asynchronous.mapper import RoundRobinMapper
from studies.harness.children import Children
from studies.harness.command import run_study
from studies.harness.interleaved import measure_interleaved
from studies.parallel.case import Case, LayerShape, Tokens
from studies.parallel.layouts import WholeExperts
from studies.parallel.meter import Meter
from studies.parallel.rank import keep_memory
from studies.parallel.shared_weights import SharedWeights

SYNCHRONOUS: Final = "synchronous"
ASYNCHRONOUS: Final = "asynchronous"
FORMS: Final = (SYNCHRONOUS, ASYNCHRONOUS)
BUFFER_BYTES: Final = 64 << 20
TIMEOUT_S: Final = 120.0
ATTENTION_WIDTH: Final = 4  # of the dense product, in multiples of the hidden size: that of attention's matrices


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """What all devices know."""

    layer: LayerShape
    num_layers: int
    num_batches: int  # of each device
    batch_size: int
    skew: float
    is_lasting: bool
    folder: str

    def topk_ids(self, layer: int, batch: int) -> np.ndarray:
        """Return what a layer's router chooses for a batch, of all devices' batches: [T, K]."""
        case = self.case(seed=layer * 1000 + batch)
        ids = case.router.route(self.batch_size)
        return ids if self.is_lasting or layer % 2 == 0 else self.layer.num_experts - 1 - ids

    def case(self, seed: int) -> Case:
        """Return a batch of one device as the layouts of `python -m studies.parallel` know it."""
        return Case(
            layer=self.layer,
            num_tokens=(self.batch_size,),
            router_skew=self.skew,
            num_experts_skew=max(self.layer.num_experts // 4, 1),
            capacity_factor=1.0,
            seed=seed,
        )

    def tokens(self, layer: int, batch: int) -> Tokens:
        """Return a batch with a layer's choices; its hidden states are those that come in."""
        found = self.case(seed=batch).tokens(0)
        return dataclasses.replace(found, topk_ids=torch.from_numpy(self.topk_ids(layer, batch)).contiguous())


class Went(msgspec.Struct, frozen=True):
    """What a device measured in one run of a form."""

    wall_s: float
    busy_s: float
    digest: str  # of the results
    spans: list[tuple[str, str, int, int]]  # row, name, start and end in ns


class Spans:
    """What a device did when."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, int, int]] = []

    @contextmanager
    def span(self, row: str, name: str) -> Iterator[None]:
        """Take down a block."""
        start_ns = time.monotonic_ns()  # the same clock in all processes
        yield
        self.found.append((row, name, start_ns, time.monotonic_ns()))


class Exchange(Meter):
    """A group whose sections begin without a barrier: collectives wait enough."""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Run the block."""
        yield


class Device:
    """One process."""

    def __init__(self, study: Study, rank: int, group: SharedMemoryGroup, shared: SharedWeights) -> None:
        self.study, self.rank, self.group = study, rank, group
        random = torch.Generator().manual_seed(1)
        hidden = study.layer.hidden
        self._attention = PackedWeight.pack(
            torch.randn(ATTENTION_WIDTH * hidden, hidden, generator=random), study.layer.weights
        )
        self._experts = shared.whole(list(range(study.layer.num_experts)))
        self.placement = ExpertPlacement.by_index(study.num_layers, study.layer.num_experts, study.layer.num_ranks)
        self.batches = range(rank, study.num_batches * study.layer.num_ranks, study.layer.num_ranks)
        self.tokens = {(layer, it): study.tokens(layer, it) for layer in range(study.num_layers) for it in self.batches}
        self._begin_replica()
        self.spans = Spans()

    def _begin_replica(self) -> None:
        study = self.study
        self._shares = ExpertShares(self.placement, self.rank)
        self._layers = [self._shares.add_layer(self._experts) for _ in range(study.num_layers)]
        service = ExpertService(1, set_up=lambda: torch.set_num_threads(1))
        place = MeetingPlace(Path(study.folder))
        peers = ExpertPeers(self.rank, study.layer.num_ranks, place, self._shares, service)
        self._shares.peers = peers.peers
        while not all(peer.is_connected for peer in peers.peers):
            time.sleep(0.01)
        compute = expert_service.compute_pairs

        def traced(*arguments: Any) -> list[Tensor]:
            with self.spans.span("service", "experts"):
                return compute(*arguments)

        expert_service.compute_pairs = traced  # type: ignore[assignment]

    def run(self, form: str) -> Went:
        """Compute all batches. Blocks: until the other devices are through."""
        self.spans = Spans()
        self.group.barrier("begin")
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        sums = self._synchronous() if form == SYNCHRONOUS else self._asynchronous()
        self.group.barrier("end")
        wall_s, busy_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        digest = hashlib.sha256(b"".join(it.numpy().tobytes() for it in sums)).hexdigest()
        return Went(wall_s, busy_s, digest, self.spans.found)

    def _attend(self, hidden: Tensor) -> Tensor:
        added = hidden + extension.linear(hidden, self._attention)[:, : hidden.shape[1]]
        attended: Tensor = added / added.norm(dim=1, keepdim=True)
        return attended

    def _synchronous(self) -> list[Tensor]:
        hidden = [self.tokens[0, batch].x for batch in self.batches]
        for layer in range(self.study.num_layers):
            for number, batch in enumerate(self.batches):
                with self.spans.span("pass", f"attention {layer}.{batch}"):
                    attended = self._attend(hidden[number])
                given = dataclasses.replace(self.tokens[layer, batch], x=attended)
                ranks = torch.tensor([home[0] for home in self.placement.homes[layer]])[given.topk_ids]
                slots = {expert: expert for expert in self.placement.held_by(self.rank, layer)}
                layout = WholeExperts(self._experts, slots, ranks, self.study.layer.num_experts)
                with self.spans.span("pass", f"experts {layer}.{batch}"):
                    hidden[number] = attended + layout.run(given, Exchange(self.group)).sums
        return hidden

    def _asynchronous(self) -> list[Tensor]:
        results: dict[int, Tensor] = {}

        def run(batch: int) -> None:
            torch.set_num_threads(1)
            hidden = self.tokens[0, batch].x
            for layer, experts in enumerate(self._layers):
                with self.spans.span(f"batch {batch}", f"attention {layer}"):
                    attended = self._attend(hidden)
                given = self.tokens[layer, batch]
                with self.spans.span(f"batch {batch}", f"experts {layer}"):
                    hidden = attended + experts.compute(attended, given.topk_ids, given.topk_weights)
            results[batch] = hidden

        threads = [threading.Thread(target=run, args=(batch,)) for batch in self.batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[batch] for batch in self.batches]


def work(descriptors: Sequence[int], rank: int) -> None:
    """Be a device: standard input brings the study and process ids, then a form a line."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    extension.set_num_threads(1)
    keep_memory()
    study, process_ids = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[Study, list[int]])
    group = SharedMemoryGroup(descriptors[0], rank, process_ids, TIMEOUT_S)
    with torch.inference_mode():
        device = Device(study, rank, group, SharedWeights.open(study.layer, descriptors[1]))
        for line in sys.stdin.buffer:
            sys.stdout.buffer.write(msgspec.json.encode(device.run(msgspec.json.decode(line))) + b"\n")
            sys.stdout.buffer.flush()


@contextmanager
def devices(study: Study) -> Iterator[Children]:
    """Start the processes."""
    number = study.layer.num_ranks
    descriptors = [make_descriptor(number, BUFFER_BYTES), SharedWeights.make_descriptor(study.layer)]
    command = [sys.executable, "-m", "studies.asynchronous.measured", "--device", *map(str, descriptors)]
    try:
        with Children() as children:
            for rank in range(number):
                children.start([*command, str(rank)], descriptors)
            children.tell((study, [process.pid for process in children.processes]))
            yield children
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def idle_s(runs: Sequence[Sequence[Went]]) -> list[float]:
    """Return how long each device idled, the median of runs."""
    return [statistics.median(went.wall_s - went.busy_s for went in of_device) for of_device in zip(*runs, strict=True)]


def simulate(study: Study, busy_s: float) -> dict[str, InFlightRun]:
    """Return both forms on the virtual clock, where devices take so long together to compute everything."""
    layer = study.layer
    shape = ModelConfig.from_fields(
        model_type="mixtral",
        vocab_size=1,
        hidden_size=layer.hidden,
        num_layers=study.num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=layer.hidden,  # the matrices of attention are then those of the dense product
        intermediate_size=layer.width,
        max_position=1,
        eps=0.0,
        rope=RopeConfig(),
        num_experts=layer.num_experts,
        top_k=layer.top_k,
    )
    costs = ModelCosts(shape, Formats(matrices=layer.weights, embeddings=layer.weights, kv="float32"))
    num_batches = study.num_batches * layer.num_ranks
    works = [work(study.batch_size) for work in (costs.pre_attention, costs.output_projection, costs.experts)]
    flops_per_s = study.num_layers * num_batches * sum(work.num_flops for work in works) / busy_s
    processor = Processor(name="core", peak_flops_per_s=((layer.weights, flops_per_s), ("float32", flops_per_s)))
    at = InFlight(
        level=MemoryLevel(name=RAM, capacity_bytes=1, read_bytes_per_s=1e15, processor=processor),
        link=None,
        costs=costs,
        num_layers=study.num_layers,
        num_devices=layer.num_ranks,
        num_batches=num_batches,
        batch_size=study.batch_size,
        context=1,
    )
    mapper = RoundRobinMapper(ExpertPlacement.by_index(study.num_layers, layer.num_experts, layer.num_ranks))
    return {form: InFlightRun(at, study.topk_ids, mapper, form) for form in FORMS}


def row(
    name: str, form: str, runs: Sequence[Sequence[Went]], idle_before: float, simulated: InFlightRun
) -> tuple[str, ...]:
    """Return a line of the table."""
    walls = [max(went.wall_s for went in each) for each in runs]
    wall, idle = statistics.median(walls), idle_s(runs)
    busy = [statistics.median(went.busy_s for went in of_device) for of_device in zip(*runs, strict=True)]
    mean = statistics.mean(idle)
    return (
        name,
        form,
        f"{format_seconds(wall)} ({format_seconds(min(walls))} to {format_seconds(max(walls))})",
        " ".join(format_seconds(it) for it in busy),
        " ".join(format_seconds(it) for it in idle),
        f"{mean / wall:.0%} ± {statistics.pstdev(idle) / wall:.0%}",
        f"{mean / idle_before:.2f}",
        f"{format_seconds(simulated.seconds)}, {simulated.idle_shares.mean():.0%} ± {simulated.idle_shares.std():.0%}",
    )


def write_trace(runs: Sequence[Went], file: Path) -> None:
    """Write what all devices did in one run for ui.perfetto.dev."""
    trace, rows = Trace(), dict[str, TraceRow]()
    for device, went in enumerate(runs):
        for name, what, start_ns, end_ns in went.spans:
            title = f"device {device}, {name}"
            if title not in rows:
                rows[title] = trace.row(title, lane=f"device {device}")
            rows[title].record(Label(what), start_ns, end_ns)
    write_perfetto(trace, file)


@click.command(context_settings={"show_default": True})
@click.option("--devices", "num_devices", type=click.IntRange(2), default=2)
@click.option("--experts", type=click.IntRange(2), default=8)
@click.option("--top-k", type=click.IntRange(1), default=2)
@click.option("--hidden", type=click.IntRange(16), default=1024)
@click.option("--width", type=click.IntRange(16), default=2048, help="Of an expert.")
@click.option("--layers", type=click.IntRange(1), default=8)
@click.option("--batches", type=click.IntRange(1), multiple=True, default=(1, 4), help="Of a device.")
@click.option("--batch-size", type=click.IntRange(1), default=32)
@click.option("--skew", type=click.FloatRange(0, 1), multiple=True, default=(0.8,))
@click.option("--repeats", type=click.IntRange(1), default=5)
@click.option("--trace", type=click.Path(path_type=Path), help="The last asynchronous run, for ui.perfetto.dev.")
def main(
    num_devices: int,
    experts: int,
    top_k: int,
    hidden: int,
    width: int,
    layers: int,
    batches: tuple[int, ...],
    batch_size: int,
    skew: tuple[float, ...],
    repeats: int,
    trace: Path | None,
) -> None:
    """Run both forms alternately on the same routing."""
    layer = LayerShape(
        num_ranks=num_devices,
        num_experts=experts,
        top_k=top_k,
        hidden=hidden,
        width=width,
        is_gated=True,
        weights="bfloat16",
    )
    rows: list[tuple[str, ...]] = []
    for share in skew:
        for is_lasting in (False, True):
            for number in batches:
                with tempfile.TemporaryDirectory() as folder:
                    study = Study(
                        layer=layer,
                        num_layers=layers,
                        num_batches=number,
                        batch_size=batch_size,
                        skew=share,
                        is_lasting=is_lasting,
                        folder=folder,
                    )
                    with devices(study) as children:
                        runs = measure_interleaved({form: partial(children.ask, form, Went) for form in FORMS}, repeats)
                digests = {tuple(went.digest for went in each) for found in runs.values() for each in found}
                assert len(digests) == 1, "both forms compute the same bits"
                before = statistics.mean(idle_s(runs[SYNCHRONOUS]))
                name = f"skew {share:g}, {'lasting' if is_lasting else 'changing'}, {number} a device"
                busy = statistics.median(sum(went.busy_s for went in each) for each in runs[SYNCHRONOUS])
                simulated = simulate(study, busy)
                rows += [row(name, form, found, before, simulated[form]) for form, found in runs.items()]
                if trace is not None:
                    write_trace(runs[ASYNCHRONOUS][-1], trace)
    heads = ("routing, batches", "form", "wall", "busy", "idle", "idle share", "idle ratio", "simulated")
    show(Table(f"{num_devices} devices, {layers} layers of {experts} experts", heads, tuple(rows), ()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--device"]:
        work([int(argument) for argument in sys.argv[2:4]], int(sys.argv[4]))
    else:
        run_study(main)
