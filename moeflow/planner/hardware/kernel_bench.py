"""Kernels at given shapes, timed: over weights in one buffer far larger than the caches, read in one format after
another.

The buffer's contents do not matter, as long as no number in it is a slow one. A measurement is the median of many
short runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Final, cast

import msgspec

from moeflow.core.errors import CapacityError
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import MIB, format_bytes
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.heads import Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.ceilings import TRIES, measure_flops, measure_read
from moeflow.kernels.cpu import attention as cpu_attention
from moeflow.kernels.cpu import extension, row_ops
from moeflow.kernels.cpu.packed_experts import PackedExperts, expert_bytes
from moeflow.kernels.cpu.packed_weight import PackedWeight, matrix_bytes
from moeflow.kernels.lazy_memory import allocate_lazily
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.rotary import RotaryTable
from moeflow.kernels.sample import RowSampling, sample_rows
from moeflow.kernels.weight_format import (
    BITS_PER_VALUE,
    BLOCK_COLUMNS,
    FORMATS,
    WEIGHT_FORMATS,
    WeightFormat,
)
from moeflow.planner.costs.model_costs import KernelWork, ModelCosts
from moeflow.planner.hardware.host import host_resources

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    import statistics

BUFFER_BYTES: Final = 384 * MIB
LEAST_BUFFER_BYTES: Final = 64 * MIB  # in less memory, caches are measured
KEPT_FREE_BYTES: Final = 96 * MIB  # for inputs, results and libraries
FILLING: Final = 0x3C  # bytes that are an ordinary number in every format
TOKENS: Final = (1, 4, 8, 16, 32, 64, 128, 512)  # closer around the roofs' bends, from 8 rows on to 100 with AMX
MAX_CALLS: Final = 200
CONTEXT: Final = 512  # of attention's measurements, in tokens
KV_BLOCK: Final = 16
ROWS: Final = 512  # of operations on rows: enough for all threads
MOST_SAMPLED: Final = 64
CHILLING_BYTES: Final = 128 * MIB
CHILLING_COLS: Final = 4096
CHUNK_TOKENS: Final = 64


class KernelShape(msgspec.Struct, frozen=True):
    """What a kernel is measured on."""

    kernel: str
    dtype: str
    sizes: tuple[
        int, ...
    ]  # linear: outputs, inputs; experts: E, top_k, H, I; rows: Q, KV, D; attention also latent or none; sampling: V

    @property
    def values(self) -> int:
        """The number of values that an efficiency is kept under."""
        if self.kernel == "experts":
            _, _, hidden, width = self.sizes
            return 3 * hidden * width
        if self.kernel == "linear":
            return self.sizes[0] * self.sizes[1]
        if self.kernel == "rows":
            num_heads, _, head_dim = self.sizes
            return num_heads * head_dim
        if self.kernel == "sampling":
            return self.sizes[0]
        _, num_kv_heads, head_dim, *latent_dims = self.sizes
        return num_kv_heads * (head_dim + sum(latent_dims or [head_dim]))


ROW_OPERATIONS: Final = KernelShape("rows", "float32", (16, 4, 64))  # of any model


def shapes_of(costs: ModelCosts) -> list[KernelShape]:
    """Return what of a model is worth measuring: its matrices, experts and attention.

    The processor has no kernels for float16, and computes in bfloat16 beside a device that holds it.
    """
    shape, formats = costs.shape, costs.formats
    attended = shape.attended_size
    qkv = shape.attention.head_dim * (shape.attention.num_heads + 2 * shape.attention.num_kv_heads)
    if shape.attention.latent is not None:
        qkv = shape.attention.head_dim + (
            shape.attention.latent.q_lora_rank or shape.attention.num_heads * shape.attention.latent.query_dim
        )
    found = [
        KernelShape("linear", _fitting(formats.matrices, shape.hidden_size), (qkv, shape.hidden_size)),
        KernelShape("linear", _fitting(formats.matrices, attended), (shape.hidden_size, attended)),
        KernelShape("linear", _of_host(formats.of_head), (shape.vocab_size, shape.hidden_size)),
        KernelShape("attention", _of_host(formats.kv), _attention_sizes(shape)),
        KernelShape("sampling", "float32", (shape.vocab_size,)),
    ]
    if shape.routing.num_experts:
        sizes = (
            shape.routing.num_experts,
            shape.routing.top_k,
            shape.hidden_size,
            shape.feed_forward.intermediate_size,
        )
        found += [KernelShape("experts", _fitting(formats.matrices, *sizes[2:]), sizes)]
        found += [KernelShape("linear", _of_host(formats.of_routers), (shape.routing.num_experts, shape.hidden_size))]
    if costs.num_dense_layers:
        width = costs.dense_values // (3 * shape.hidden_size)
        dtype = _fitting(formats.matrices, shape.hidden_size, width)
        found += [KernelShape("experts", dtype, (1, 1, shape.hidden_size, width))]
    return list(dict.fromkeys(found))


def _attention_sizes(shape: ModelConfig) -> tuple[int, ...]:
    sizes = (shape.attention.num_heads, shape.attention.num_kv_heads, shape.attention.head_dim)
    return sizes if shape.attention.latent is None else (*sizes, shape.attention.latent_dim)


def _of_host(dtype: str) -> str:
    return "bfloat16" if dtype == "float16" else dtype


def _fitting(dtype: str, *columns: int) -> str:
    """Return a format, or if it holds no matrices of so many columns, as files' blocks may not, one about as fast."""
    dtype = _of_host(dtype)
    record = FORMATS[dtype]
    if record.is_made or record.wider is None or all(it % BLOCK_COLUMNS == 0 for it in columns):
        return dtype
    return record.wider


class BestRates(msgspec.Struct, frozen=True):
    """What the machine did at best at one moment."""

    read: float  # bytes a second
    peaks: dict[str, float]  # FLOP/s by format


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    tokens: tuple[int, ...]
    min_calls: int
    min_s: float  # of one measurement
    num_passes: int  # of tiny models
    passes_s: float  # of these at most
    watches_roofs: bool  # from shape to shape: they drift
    most_values: int  # of a matrix; of a larger one, a part


THOROUGH: Final = Effort(TOKENS, 5, 0.03, 24, 3.0, True, 1 << 62)
QUICK: Final = Effort((1, 16, 64), 3, 0.0, 8, 0.5, False, 1 << 22)


def parts_of(shapes: Iterable[KernelShape], effort: Effort) -> list[KernelShape]:
    """Return the shapes to measure: of a matrix too large for the effort, so many rows."""
    found = []
    for shape in shapes:
        if shape.kernel == "linear" and shape.values > effort.most_values:
            inputs = shape.sizes[1]
            found.append(KernelShape("linear", shape.dtype, (max(effort.most_values // inputs, 1), inputs)))
        else:
            found.append(shape)
    return list(dict.fromkeys(found))


class KernelBench:
    """Runs kernels, and samples the machine's roofs."""

    def __init__(self, num_threads: int, effort: Effort) -> None:
        """Take the buffer. Raises: CapacityError if the free memory holds none that is large enough."""
        self._num_threads = num_threads
        self.effort = effort
        self._chunk = torch.ones(CHUNK_TOKENS, 1024)
        room_bytes = host_resources().available_bytes - KEPT_FREE_BYTES
        num_bytes = min(BUFFER_BYTES, max(room_bytes, LEAST_BUFFER_BYTES))
        self._buffer = _filled(num_bytes)  # on huge pages, as keys and values are

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Let kernels compute with the threads that are measured, for a while."""
        if not extension.is_available():
            yield
            return
        before = extension.num_threads()
        extension.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            extension.set_num_threads(before)

    def roofs(self) -> BestRates:
        """Return how fast memory is read and matrices are multiplied at this moment."""
        read = measure_read(self._num_threads, buffer=self._buffer)
        if not extension.is_available():
            return BestRates(read, {"float32": measure_flops(self._num_threads)})
        return BestRates(read, {dtype: self._peak(dtype) for dtype in WEIGHT_FORMATS})

    def measure(self, shape: KernelShape) -> list[tuple[KernelWork, float]]:
        """Return work of a shape and the seconds it takes, for several numbers of tokens."""
        measures = {
            "linear": self._linear,
            "experts": self._experts,
            "attention": self._attention,
            "rows": self._rows,
            "sampling": self._sampling,
        }
        return list(measures[shape.kernel](shape, torch.Generator().manual_seed(0)))

    def _peak(self, dtype: WeightFormat) -> float:
        """Return FLOP/s of a product with a matrix that stays in the cache."""
        weight = PackedWeight(self._buffer[: _matrix_bytes(dtype, 512, 512)], dtype, 512, 512)
        x = torch.rand(512, 512)
        return 2.0 * 512**3 / min(_times(lambda: extension.linear(x, weight), TRIES, 0.0))

    def _linear(self, shape: KernelShape, random: torch.Generator) -> Iterator[tuple[KernelWork, float]]:
        outputs, inputs = shape.sizes
        dtype = cast(WeightFormat, shape.dtype)
        num_bytes = _matrix_bytes(dtype, outputs, inputs)
        weights = cycle([PackedWeight(part, dtype, outputs, inputs) for part in self._parts(num_bytes)])
        for num_tokens in self.effort.tokens:
            x = torch.rand(num_tokens, inputs, generator=random)
            seconds = self._median(lambda x=x: extension.linear(x, next(weights)))  # type: ignore[misc]
            values = outputs * inputs
            size = values * BITS_PER_VALUE[dtype] / 8
            yield KernelWork("linear", dtype, size, 2.0 * num_tokens * values, num_tokens, values), seconds

    def _experts(self, shape: KernelShape, random: torch.Generator) -> Iterator[tuple[KernelWork, float]]:
        num_experts, top_k, hidden, width = shape.sizes
        dtype = cast(WeightFormat, shape.dtype)
        num_bytes = expert_bytes(hidden, width, dtype)
        fitting = max(min(num_experts, self._buffer.nbytes // (2 * num_bytes)), top_k)  # at least two layers
        layers = cycle(
            PackedExperts(fitting, hidden, width, dtype, storage=part.view(fitting, num_bytes))
            for part in self._parts(fitting * num_bytes)
        )
        values = 3 * hidden * width
        for num_tokens in self.effort.tokens:
            x = torch.rand(num_tokens, hidden, generator=random)
            chosen = torch.rand(8, num_tokens, fitting, generator=random).topk(top_k).indices
            turns = cycle(chosen.unbind())
            shares = torch.full((num_tokens, top_k), 1.0 / top_k)
            used = statistics.mean(len(ids.unique()) for ids in chosen)
            run = lambda x=x, shares=shares, turns=turns: next(layers).compute(x, next(turns), shares)  # noqa: E731
            seconds = self._median(run)
            pairs = num_tokens * top_k
            size = used * values * BITS_PER_VALUE[dtype] / 8
            yield KernelWork("experts", dtype, size, 2.0 * pairs * values, pairs / used, values), seconds

    def _attention(self, shape: KernelShape, random: torch.Generator) -> Iterator[tuple[KernelWork, float]]:
        """Yield decoding of many sequences, then a chunk of one prompt."""
        num_heads, num_kv_heads, head_dim, *latent_dims = shape.sizes
        latent_dim = sum(latent_dims)
        dtype = getattr(torch, shape.dtype)
        shaped = {
            "num_kv_heads": num_kv_heads,
            "block_size": KV_BLOCK,
            "head_dim": head_dim,
            "latent_dim": latent_dim,
        }
        block_bytes = kv_block_bytes(dtype, **shaped)
        each = CONTEXT // KV_BLOCK
        num_sequences = max(min(self._buffer.nbytes // (2 * block_bytes * each), 64), 1)  # at least two layers
        layers = [KVBlocks(part, dtype, **shaped) for part in self._parts(num_sequences * each * block_bytes)]
        if layers[0].handle is None:  # a shape that torch computes
            return
        size = block_bytes / KV_BLOCK
        tables = [list(range(i * each, (i + 1) * each)) for i in range(num_sequences)]
        cases = (([CONTEXT - 1] * num_sequences, [1] * num_sequences, tables), ([0], [CONTEXT], tables[:1]))
        for starts, counts, table in cases:
            metadata = AttentionMetadata.build(
                starts=starts, num_tokens=counts, block_ids=table, block_size=KV_BLOCK, device="cpu"
            )
            turns = cycle(layers)  # those of one would stay in large caches
            q = torch.rand(sum(counts), num_heads, head_dim, generator=random)
            run = lambda q=q, it=turns, metadata=metadata: cpu_attention.attend(q, next(it), metadata)  # noqa: E731
            seconds = self._median(run)
            read = len(starts) * CONTEXT
            seen = sum(start * count + count * (count + 1) / 2 for start, count in zip(starts, counts, strict=True))
            rows = num_heads / num_kv_heads * max(seen / read, 1.0)
            flops = 2.0 * num_heads * (head_dim + (latent_dim or head_dim)) * seen
            yield KernelWork("attention", shape.dtype, read * size, flops, rows, shape.values), seconds

    def _rows(self, shape: KernelShape, random: torch.Generator) -> Iterator[tuple[KernelWork, float]]:
        """Yield what a layer does with rows between its products: two norms, and queries, keys and values."""
        num_heads, num_kv_heads, head_dim = shape.sizes
        hidden_size, qkv = num_heads * head_dim, (num_heads + 2 * num_kv_heads) * head_dim
        heads = Heads(num_heads, num_kv_heads, head_dim, torch.ones(head_dim), torch.ones(head_dim))
        shaped = {"num_kv_heads": num_kv_heads, "block_size": KV_BLOCK, "head_dim": head_dim}
        storage = torch.zeros(kv_block_bytes(torch.float32, **shaped) * ROWS // KV_BLOCK, dtype=torch.uint8)
        blocks = KVBlocks(storage, torch.float32, **shaped)
        norm, slots = torch.ones(hidden_size), torch.arange(ROWS)
        x, projected = (torch.rand(ROWS, size, generator=random) for size in (hidden_size, qkv))
        table = RotaryTable(torch.ones(ROWS, 1, head_dim), torch.zeros(ROWS, 1, head_dim))

        def run() -> None:
            row_ops.rms_norm(x, norm, 1e-6)
            row_ops.rms_norm(x, norm, 1e-6)
            row_ops.attention_input(projected, heads, table, blocks, slots)

        num_bytes = ROWS * (8 * hidden_size + 2 * qkv) * 4.0  # as `ModelCosts.row_operations` counts
        yield KernelWork("rows", "float32", num_bytes, 0.0, ROWS, hidden_size), self._median(run)

    def _sampling(self, shape: KernelShape, random: torch.Generator) -> Iterator[tuple[KernelWork, float]]:
        (vocab_size,) = shape.sizes
        for num_rows in (it for it in self.effort.tokens if it <= MOST_SAMPLED):
            logits = torch.randn(num_rows, vocab_size, generator=random)
            samplings = [RowSampling(row, 1.0, number=0.5) for row in range(num_rows)]

            def run(logits: Tensor = logits, samplings: list[RowSampling] = samplings) -> None:
                sample_rows(logits, samplings)

            yield KernelWork("sampling", "float32", 4.0 * logits.numel(), 0.0, num_rows, vocab_size), self._median(run)

    def chill(self) -> None:
        """Drive everything else from the caches, as a pass over a model's weights does."""
        num_rows = min(CHILLING_BYTES, self._buffer.nbytes) // (4 * CHILLING_COLS)
        weight = PackedWeight(self._buffer[: 4 * num_rows * CHILLING_COLS], "float32", num_rows, CHILLING_COLS)
        extension.linear(torch.ones(1, CHILLING_COLS), weight)

    def compute(self) -> None:
        """Multiply as a chunk of a prompt does, for some milliseconds."""
        for part in self._parts(_matrix_bytes("int8", 1024, 1024))[:16]:
            extension.linear(self._chunk, PackedWeight(part, "int8", 1024, 1024))

    def _median(self, run: Callable[[], object]) -> float:
        return statistics.median(_times(run, self.effort.min_calls, self.effort.min_s))

    def _parts(self, num_bytes: int) -> list[Tensor]:
        """Cut the buffer into parts; a new one if even one does not fit."""
        if num_bytes > self._buffer.nbytes:
            self._buffer = self._buffer[:0]  # not both at a time
            self._buffer = _filled(num_bytes)
        count = min(self._buffer.nbytes // num_bytes, 256)
        stride = num_bytes // 64 * 64 if count == 1 else -(-num_bytes // 64) * 64
        count = min(count, (self._buffer.nbytes - num_bytes) // max(stride, 1) + 1)
        return [self._buffer[i * stride : i * stride + num_bytes] for i in range(count)]


def _filled(num_bytes: int) -> Tensor:
    """Return a buffer that is in memory. Raises: CapacityError if the free memory does not hold it."""
    have_bytes = host_resources().available_bytes
    if num_bytes + KEPT_FREE_BYTES > have_bytes:
        raise CapacityError(
            f"measuring needs {format_bytes(num_bytes + KEPT_FREE_BYTES)} of memory, but {format_bytes(have_bytes)} "
            "are free: free memory"
        )
    return allocate_lazily(num_bytes).fill_(FILLING)


def _times(run: Callable[[], object], least: int, during_s: float) -> list[float]:
    """Return the seconds of calls, after one that does not count."""
    run()
    times: list[float] = []
    end = time.perf_counter() + during_s
    while len(times) < least or (time.perf_counter() < end and len(times) < MAX_CALLS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def _matrix_bytes(dtype: str, outputs: int, inputs: int) -> int:
    return matrix_bytes(cast(WeightFormat, dtype), outputs, inputs)
