"""Measures this machine: what memory, processor and disk do at best, and how near to that kernels come at given shapes.

The one file of the planner that computes. Weights are one buffer far larger than the caches, seen in every format in
turn: what is in it does not matter, as long as no number in it is a slow one. A measurement is the lower quartile of
many short runs, so that what else the machine does now and then does not count.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor

from moeflow.core.hardware import DISK, RAM, KernelEfficiency, Link, LinkRate, Machine, MemoryLevel, Processor
from moeflow.core.units import KIB, MIB
from moeflow.kernels import cpu, cpu_attention
from moeflow.kernels.attention_metadata import AttentionMetadata
from moeflow.kernels.ceilings import TRIES, measure_flops, measure_read
from moeflow.kernels.cpu import PackedExperts, PackedWeight
from moeflow.kernels.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.lazy_memory import allocate_lazily
from moeflow.kernels.weight_format import BITS_PER_VALUE, WEIGHT_FORMATS, WeightFormat
from moeflow.planner.model_costs import ModelCosts, Work
from moeflow.planner.roofline import processor_of, work_seconds

OnStep = Callable[[str], None]  # told what is being measured

BUFFER_BYTES: Final = 384 * MIB
FILLING: Final = 0x3C  # bytes that are an ordinary number in every format
TOKENS: Final = (1, 4, 8, 16, 32, 128, 512)
MEASURED_UNCERTAINTY: Final = 0.12
LEAST_S: Final = 0.03  # of one measurement
MOST_CALLS: Final = 200
DISK_BYTES: Final = 256 * MIB
DISK_SIZES: Final = (256 * KIB, MIB, 4 * MIB)
DISK_DEPTHS: Final = (1, 4, 8, 16)
DISK_S: Final = 0.2  # of one size and depth
CONTEXT: Final = 512  # of attention's measurements, in tokens
KV_BLOCK: Final = 16
PASS_S: Final = (
    4e-4  # of a pass beside kernels, and of each token in it: measured with `bench engine` on two Zen 5 cores
)
TOKEN_S: Final = 3e-5


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What a kernel is measured on."""

    kernel: str
    dtype: str
    sizes: tuple[int, ...]  # linear: outputs, inputs; experts: E, top_k, H, I; attention: Q, KV, D


GENERAL: Final = tuple(
    KernelShape(kernel, dtype, sizes)
    for dtype in WEIGHT_FORMATS
    for kernel, sizes in (("linear", (2048, 1024)), ("experts", (16, 2, 1024, 768)))
) + tuple(KernelShape("attention", dtype, (16, 4, 64)) for dtype in ("float32", "bfloat16", "int8"))


def shapes_of(costs: ModelCosts) -> list[KernelShape]:
    """Return what of a model is worth measuring: its matrices, experts and attention."""
    shape, formats = costs.shape, costs.formats
    attended = shape.num_heads * shape.head_dim
    qkv = attended + 2 * shape.num_kv_heads * shape.head_dim
    found = [
        KernelShape("linear", formats.matrices, (qkv, shape.hidden_size)),
        KernelShape("linear", formats.matrices, (shape.hidden_size, attended)),
        KernelShape("linear", formats.embeddings, (shape.vocab_size, shape.hidden_size)),
        KernelShape("attention", formats.kv, (shape.num_heads, shape.num_kv_heads, shape.head_dim)),
    ]
    if shape.num_experts:
        sizes = (shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size)
        found += [KernelShape("experts", formats.matrices, sizes)]
        found += [KernelShape("linear", formats.matrices, (shape.num_experts, shape.hidden_size))]
    if costs.num_dense_layers:
        width = costs.dense_values // (3 * shape.hidden_size)
        found += [KernelShape("experts", formats.matrices, (1, 1, shape.hidden_size, width))]
    return list(dict.fromkeys(found))


def measure_machine(
    name: str, *, num_threads: int, ram_bytes: int, folder: Path, on_step: OnStep = lambda _: None
) -> Machine:
    """Measure a machine without a device: memory, processor, disk, and kernels on shapes of the middle.

    `folder` is on the disk that counts. Blocks: for some 15 seconds. Raises: OSError if nothing can be written there.
    """
    on_step("disk")
    disk = measure_disk(folder)
    bench = _Bench(num_threads)
    measured = bench.measure_all(GENERAL, on_step)
    processor = Processor(
        name=_processor_name(), peak_flops_per_s=tuple(bench.peaks.items()), pass_s=PASS_S, token_s=TOKEN_S
    )
    free = os.statvfs(folder)
    room = max(free.f_bavail * free.f_frsize, 1)
    levels = (
        MemoryLevel(name=DISK, capacity_bytes=room, read_bytes_per_s=disk.peak_bytes_per_s),
        MemoryLevel(name=RAM, capacity_bytes=ram_bytes, read_bytes_per_s=bench.read, processor=processor),
    )
    how = f"measured by moeflow: {num_threads} threads, {cpu.isa_name() if cpu.is_available() else 'torch'}"
    machine = Machine(
        name=name, levels=levels, links=(disk,), uncertainty=MEASURED_UNCERTAINTY, sources=(("all", how),)
    )
    return _with_efficiencies(machine, measured)


def measure_kernels(
    machine: Machine, shapes: Iterable[KernelShape], *, num_threads: int, on_step: OnStep = lambda _: None
) -> Machine:
    """Return the machine with the kernels' efficiency on more shapes, as far as they are not known yet."""
    known = {_key(entry) for entry in processor_of(machine.level(RAM)).efficiencies}
    missing = [shape for shape in shapes if (shape.kernel, shape.dtype, _values(shape)) not in known]
    if not missing or not cpu.is_available():
        return machine
    return _with_efficiencies(machine, _Bench(num_threads).measure_all(missing, on_step))


def _with_efficiencies(machine: Machine, measured: Iterable[tuple[Work, float]]) -> Machine:
    processor = processor_of(machine.level(RAM))
    bare = replace(processor, efficiencies=(), default_efficiency=1.0, launch_s=0.0)
    level = replace(machine.level(RAM), processor=bare)
    found = {(*_key(entry), entry.rows): entry for entry in processor.efficiencies}
    for work, seconds in measured:
        entry = KernelEfficiency(
            kernel=work.kernel,
            dtype=work.dtype,
            rows=round(work.rows, 3),
            share=work_seconds(level, work) / seconds,
            values=work.values,
        )
        found[(*_key(entry), entry.rows)] = entry
    made = replace(processor, efficiencies=tuple(found.values()))
    levels = tuple(replace(it, processor=made) if it.name == RAM else it for it in machine.levels)
    return replace(machine, levels=levels)


def _key(entry: KernelEfficiency) -> tuple[str, str, int]:
    return entry.kernel, entry.dtype, entry.values


def _values(shape: KernelShape) -> int:
    """Return the number of values that an efficiency is kept under."""
    if shape.kernel == "experts":
        _, _, hidden, width = shape.sizes
        return 3 * hidden * width
    if shape.kernel == "linear":
        return shape.sizes[0] * shape.sizes[1]
    _, num_kv_heads, head_dim = shape.sizes
    return 2 * num_kv_heads * head_dim


class _Bench:
    """Runs kernels over one buffer, and in between the machine's roofs, of which the best samples count."""

    def __init__(self, num_threads: int) -> None:
        self.read = 0.0  # bytes a second
        self.peaks: dict[str, float] = {}  # FLOP/s by format
        self._num_threads = num_threads
        self._buffer = torch.full((BUFFER_BYTES,), FILLING, dtype=torch.uint8)
        self._random = torch.Generator().manual_seed(0)

    def measure_all(self, shapes: Iterable[KernelShape], on_step: OnStep) -> list[tuple[Work, float]]:
        """Return work and how long it takes, for each shape and number of tokens."""
        found: list[tuple[Work, float]] = []
        on_step("memory and arithmetic")
        if not cpu.is_available():
            self._sample_roofs()
            return found
        before = cpu.num_threads()
        cpu.set_num_threads(self._num_threads)
        try:
            self._sample_roofs()
            for shape in shapes:
                on_step(f"{shape.kernel} in {shape.dtype}")
                found += self._measure(shape)
                self._sample_roofs()
        finally:
            cpu.set_num_threads(before)
        return found

    def _measure(self, shape: KernelShape) -> Iterator[tuple[Work, float]]:
        measures = {"linear": self._linear, "experts": self._experts, "attention": self._attention}
        yield from measures[shape.kernel](shape)

    def _sample_roofs(self) -> None:
        self.read = max(self.read, measure_read(self._num_threads, buffer=self._buffer))
        formats = WEIGHT_FORMATS if cpu.is_available() else ()
        samples = {dtype: self._peak(dtype) for dtype in formats} or {"float32": measure_flops(self._num_threads)}
        self.peaks = {dtype: max(self.peaks.get(dtype, 0.0), flops) for dtype, flops in samples.items()}

    def _peak(self, dtype: WeightFormat) -> float:
        """Return FLOP/s of a product with a matrix that stays in the cache."""
        weight = PackedWeight(self._buffer[: _matrix_bytes(dtype, 512, 512)], dtype, 512, 512)
        x = torch.rand(512, 512)
        return 2.0 * 512**3 / min(_times(lambda: cpu.linear(x, weight), least=TRIES, during_s=0.0))

    def _linear(self, shape: KernelShape) -> Iterator[tuple[Work, float]]:
        outputs, inputs = shape.sizes
        dtype = cast(WeightFormat, shape.dtype)
        num_bytes = _matrix_bytes(dtype, outputs, inputs)
        weights = cycle([PackedWeight(part, dtype, outputs, inputs) for part in self._parts(num_bytes)])
        for num_tokens in TOKENS:
            x = torch.rand(num_tokens, inputs, generator=self._random)
            seconds = _usual(_times(lambda x=x: cpu.linear(x, next(weights))))  # type: ignore[misc]
            values = outputs * inputs
            size = values * BITS_PER_VALUE[dtype] / 8
            yield Work("linear", dtype, size, 2.0 * num_tokens * values, num_tokens, values), seconds

    def _experts(self, shape: KernelShape) -> Iterator[tuple[Work, float]]:
        num_experts, top_k, hidden, width = shape.sizes
        dtype = cast(WeightFormat, shape.dtype)
        num_bytes = cpu.expert_bytes(hidden, width, dtype)
        fitting = max(min(num_experts, self._buffer.nbytes // (2 * num_bytes)), top_k)  # two layers in turn at least
        layers = cycle(
            PackedExperts(fitting, hidden, width, dtype, storage=part.view(fitting, num_bytes))
            for part in self._parts(fitting * num_bytes)
        )
        values = 3 * hidden * width
        for num_tokens in TOKENS:
            x = torch.rand(num_tokens, hidden, generator=self._random)
            chosen = torch.rand(8, num_tokens, fitting, generator=self._random).topk(top_k).indices
            turns = cycle(chosen.unbind())
            shares = torch.full((num_tokens, top_k), 1.0 / top_k)
            used = statistics.mean(len(ids.unique()) for ids in chosen)
            run = lambda x=x, shares=shares, turns=turns: cpu.experts(x, next(layers), next(turns), shares)  # noqa: E731
            seconds = _usual(_times(run))
            pairs = num_tokens * top_k
            size = used * values * BITS_PER_VALUE[dtype] / 8
            yield Work("experts", dtype, size, 2.0 * pairs * values, pairs / used, values), seconds

    def _attention(self, shape: KernelShape) -> Iterator[tuple[Work, float]]:
        """Yield decoding of many sequences, then a chunk of one prompt."""
        num_heads, num_kv_heads, head_dim = shape.sizes
        dtype = getattr(torch, shape.dtype)
        block_bytes = kv_block_bytes(dtype, num_kv_heads=num_kv_heads, block_size=KV_BLOCK, head_dim=head_dim)
        each = CONTEXT // KV_BLOCK
        num_sequences = max(min(self._buffer.nbytes // (block_bytes * each), 64), 1)
        storage = self._buffer[: num_sequences * each * block_bytes]
        blocks = KVBlocks(storage, dtype, num_kv_heads=num_kv_heads, block_size=KV_BLOCK, head_dim=head_dim)
        if blocks.handle is None:  # a shape that torch computes
            return
        size = block_bytes / KV_BLOCK
        tables = [list(range(i * each, (i + 1) * each)) for i in range(num_sequences)]
        cases = (([CONTEXT - 1] * num_sequences, [1] * num_sequences, tables), ([0], [CONTEXT], tables[:1]))
        for starts, counts, table in cases:
            metadata = AttentionMetadata.build(
                starts=starts, num_tokens=counts, block_ids=table, block_size=KV_BLOCK, device="cpu"
            )
            q = torch.rand(sum(counts), num_heads, head_dim, generator=self._random)
            run = lambda q=q, metadata=metadata: cpu_attention.attend(q, blocks, metadata, None)  # noqa: E731
            seconds = _usual(_times(run))
            read = len(starts) * CONTEXT
            seen = sum(start * count + count * (count + 1) / 2 for start, count in zip(starts, counts, strict=True))
            rows = num_heads / num_kv_heads * max(seen / read, 1.0)
            flops = 4.0 * num_heads * head_dim * seen
            yield Work("attention", shape.dtype, read * size, flops, rows, 2 * num_kv_heads * head_dim), seconds

    def _parts(self, num_bytes: int) -> list[Tensor]:
        """Cut the buffer into parts; a new one if even one does not fit."""
        if num_bytes > self._buffer.nbytes:
            self._buffer = torch.full((num_bytes,), FILLING, dtype=torch.uint8)
        count = min(self._buffer.nbytes // num_bytes, 256)
        stride = num_bytes // 64 * 64 if count == 1 else -(-num_bytes // 64) * 64
        count = min(count, (self._buffer.nbytes - num_bytes) // max(stride, 1) + 1)
        return [self._buffer[i * stride : i * stride + num_bytes] for i in range(count)]


def _times(run: Callable[[], object], least: int = 5, during_s: float = LEAST_S) -> list[float]:
    """Return the seconds of calls, after one that does not count."""
    run()
    times: list[float] = []
    end = time.perf_counter() + during_s
    while len(times) < least or (time.perf_counter() < end and len(times) < MOST_CALLS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def _usual(times: Sequence[float]) -> float:
    """Return the lower quartile."""
    return sorted(times)[len(times) // 4]


def _matrix_bytes(dtype: str, outputs: int, inputs: int) -> int:
    whole_bands = -(-outputs // 16) * 16
    return int(whole_bands * inputs * BITS_PER_VALUE[dtype] / 8)


def measure_disk(folder: Path, num_bytes: int | None = None) -> Link:
    """Return how fast random places of a new file in a folder are read past the page cache, by size and depth.

    Raises: OSError if it cannot be written.
    """
    rates, num_bytes = [], num_bytes or DISK_BYTES
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="disk-", suffix=".tmp") as file:
        for _ in range(num_bytes // MIB):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        descriptor = _open_direct(Path(file.name))
        try:
            for size in DISK_SIZES:
                for depth in DISK_DEPTHS:
                    rate = _disk_rate(descriptor, num_bytes, size, depth)
                    rates.append(LinkRate(transfer_bytes=size, bytes_per_s=rate, depth=depth))
        finally:
            os.close(descriptor)
    return Link(source=DISK, target=RAM, rates=tuple(rates))


def _open_direct(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without direct reads
        return os.open(file, os.O_RDONLY)


def _disk_rate(descriptor: int, num_bytes: int, size: int, depth: int) -> float:
    places = torch.randperm(num_bytes // size, generator=torch.Generator().manual_seed(0)).tolist()
    memory = _page_aligned(depth * size)
    end = time.perf_counter() + DISK_S

    def read(index: int) -> int:
        done = 0
        for place in places[index::depth]:
            done += os.preadv(descriptor, [memory[index * size : (index + 1) * size]], place * size)
            if time.perf_counter() > end:
                break
        return done

    with ThreadPoolExecutor(depth) as threads:
        start = time.perf_counter()
        total = sum(threads.map(read, range(depth)))
        return total / (time.perf_counter() - start)


def _page_aligned(num_bytes: int) -> memoryview:
    """Return memory as slots of experts have it: on huge pages, into which some disks read three times as fast."""
    storage = allocate_lazily(max(num_bytes + 4096, 4 * MIB))
    start = -storage.data_ptr() % 4096
    view: memoryview = storage[start : start + num_bytes].numpy().data
    return view


def _processor_name() -> str:
    """Return what the system calls the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else "processor"
