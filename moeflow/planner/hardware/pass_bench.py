"""What passes take beside kernels and disk: those of a tiny model, with caches as a large one's weights leave them.

The parts below the engine run unchanged: scheduler, tensors of a pass, layers, sampling. Where experts come from disk,
their cache and its reading threads run, too, from a file that takes no time. What the engine itself adds is more
Python of the same kind: a share of that.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch

from moeflow.checkpoint.packed.file_io import open_for_reading
from moeflow.checkpoint.packed.layout import SlabIndex, SlabSpec
from moeflow.core.batch import Batch
from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.hardware import DEFAULT_LOAD_S, DEFAULT_STOP_S
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.policies import DEFAULT_POLICY, POLICIES
from moeflow.experts.cached_experts import ExpertPool
from moeflow.experts.disk_reader import READ_DEPTHS, DiskReader
from moeflow.experts.slot_arena import SlotArena
from moeflow.kernels.cpu.decoder import PackedDecoder
from moeflow.kernels.cpu.packed_experts import PackedExperts, expert_bytes
from moeflow.kernels.embedding import embedding
from moeflow.kernels.sample import RowSampling, sample_rows
from moeflow.kv.storage import KVStorage
from moeflow.models.families import qwen3_moe
from moeflow.models.layers.allocation.expert_homes import InCache, InMemory
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.pass_input import PassInput
from moeflow.planner.hardware.tiny_layer import tiny_shape
from moeflow.scheduler.scheduler import Scheduler

Chill = Callable[[], object]  # drives everything from the caches, as a pass over a large model's weights does

NUM_EXPERTS: Final = 16
FEW, MANY = 1, 8  # experts that a layer lacks
TOGETHER: Final = 32  # sequences
MIN_PASSES: Final = 4  # of each kind, however long they take
PROMPT_TOKENS: Final = 64
BLOCK_SIZE: Final = 16
# Time of the engine's other work (results, statistics, choice of sampling), as a multiple of the time here.
ENGINE_OF_PASS: Final = 0.5
ENGINE_OF_TOKEN: Final = 0.5


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Seconds beside kernels and reads; see `Processor`."""

    pass_s: float
    token_s: float
    stop_s: float
    load_s: float


NO_ENGINE: Final = EngineTimes(0.0, 0.0, DEFAULT_STOP_S, DEFAULT_LOAD_S)  # where nothing can be measured


def median_times(measured: Sequence[EngineTimes]) -> EngineTimes:
    """Return the median of each."""
    return EngineTimes(*(statistics.median(column) for column in zip(*map(astuple, measured), strict=True)))


def measure_engine(chill: Chill, num_passes: int, most_s: float) -> EngineTimes:
    """Return what so many passes of each kind take, or fewer, but some, if they take longer than `most_s`.

    Blocks. Runs on the kernels' threads and needs the CPU extension.
    """
    resident = _TinyModel(top_k=FEW)
    with _absent_experts(FEW) as few, _absent_experts(MANY) as many, torch.inference_mode():
        kinds = ((resident, 1), (resident, TOGETHER), (few, 1), (many, 1))
        drivers = [_Driver(tiny, num_sequences, num_passes) for tiny, num_sequences in kinds]
        began_s, turns = time.perf_counter(), list[list[_Pass]]()
        while len(turns) < num_passes and (len(turns) < MIN_PASSES or time.perf_counter() < began_s + most_s):
            turns.append([driver.run_pass(chill) for driver in drivers])  # alternately: a drift hits all alike
    alone, together, few_passes, many_passes = zip(*turns, strict=True)
    alone_s, together_s = (_calm([it.beside_s for it in passes]) for passes in (alone, together))
    whole_s, few_s, many_s = (_calm([it.whole_s for it in passes]) for passes in (alone, few_passes, many_passes))
    token_s = max(together_s - alone_s, 0.0) / (TOGETHER - 1)
    load_s = max(many_s - few_s, 0.0) / (MANY - FEW)
    return EngineTimes(
        pass_s=max(alone_s - token_s, 0.0) * (1 + ENGINE_OF_PASS),
        token_s=token_s * (1 + ENGINE_OF_TOKEN),
        stop_s=max(few_s - whole_s - FEW * load_s, 0.0),
        load_s=load_s,
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    whole_s: float
    kernels_s: float  # of that, in the call that runs all layers

    @property
    def beside_s(self) -> float:
        return self.whole_s - self.kernels_s


class _TinyModel:
    """One layer of zeros, which chooses the experts of the lowest numbers."""

    def __init__(self, top_k: int, pool: ExpertPool | None = None) -> None:
        self.shape = tiny_shape(num_experts=NUM_EXPERTS, top_k=top_k)
        formats = WeightFormats("float32", "float32")
        home = InMemory() if pool is None else InCache(pool)
        self.model: CausalLM = qwen3_moe.build(
            self.shape, PackedAllocator(torch.float32, torch.device("cpu"), formats, home=home)
        )
        self._cache = None if pool is None else pool.cache
        layers = [packed for layer in self.model.layers if (packed := layer.packed()) is not None]
        self.decoder = PackedDecoder(layers, self.model.rotary.kinds, self.model.norm.weights)

    @property
    def comes_from_disk(self) -> bool:
        """Whether its experts do."""
        return self._cache is not None

    def prepare(self) -> None:
        """Have the experts that will be chosen be absent, if they come from disk."""
        if self._cache is None:
            return
        lease = self._cache.acquire(0, range(NUM_EXPERTS - self._cache.num_slots, NUM_EXPERTS))
        lease.wait()
        lease.release()
        self._cache.begin_pass()


@contextmanager
def _absent_experts(count: int) -> Iterator[_TinyModel]:
    """Yield a model that lacks so many experts in each pass, and gets them at once."""
    shape = tiny_shape(num_experts=NUM_EXPERTS, top_k=count)
    slab_bytes = expert_bytes(shape.hidden_size, shape.feed_forward.intermediate_size, "float32")
    num_slots = max(count, 2)
    arena = SlotArena(num_slots, slab_bytes)
    zeros = _Zeros(slab_bytes)
    disk = DiskReader(zeros, arena, num_threads=READ_DEPTHS[0])
    cache = ExpertCache(
        num_layers=1,
        num_experts=NUM_EXPERTS,
        num_slots=num_slots,
        slab_bytes=slab_bytes,
        policy=POLICIES[DEFAULT_POLICY](1, NUM_EXPERTS),
        start_loads=disk.start_loads,
        wait=disk.wait,
    )
    slots = PackedExperts(
        num_slots, shape.hidden_size, shape.feed_forward.intermediate_size, "float32", storage=arena.slots
    )
    pool = ExpertPool(cache, slots)
    pool.fetcher = disk
    disk.serve(cache)
    try:
        yield _TinyModel(count, pool)
    finally:
        cache.drain()
        disk.close()
        zeros.close()


class _Zeros:
    """Slabs of zeros, which take hardly longer to read than to write to memory. See `disk_reader.Slabs`."""

    is_direct = True

    def __init__(self, slab_bytes: int) -> None:
        sizes = {"num_layers": 1, "num_experts": NUM_EXPERTS, "slab_bytes": slab_bytes, "resident_bytes": 0}
        names = {"identity": "", "weight_format": "float32", "embedding_format": "float32", "layout": ""}
        path = Path("/dev/zero")
        self.index = SlabIndex(path, msgspec.convert(names | sizes, SlabSpec), ())
        self.descriptor = open_for_reading(path, direct=False)

    def read(self, number: int, into: memoryview) -> None:
        """See `SlabReader.read`."""
        into[:] = bytes(len(into))

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


class _Driver:
    """Runs sequences on a tiny model, pass by pass, as the engine does."""

    def __init__(self, tiny: _TinyModel, num_sequences: int, num_passes: int) -> None:
        shape, length = tiny.shape, PROMPT_TOKENS + num_passes + 1
        num_blocks = num_sequences * -(-length // BLOCK_SIZE) + 1
        limits = SchedulerConfig(
            block_size=BLOCK_SIZE, num_blocks=num_blocks, max_model_len=length, max_num_seqs=num_sequences
        )
        self._tiny = tiny
        self._scheduler = Scheduler(limits)
        self._kv = KVStorage(
            layers=range(shape.num_layers),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=shape.attention.num_kv_heads,
            head_dim=shape.attention.head_dim,
            dtype=torch.float32,
            device="cpu",
        )
        sampling = SamplingParams(max_tokens=num_passes + 1, ignore_eos=True)
        for number in range(num_sequences):
            prompt = [(number + place) % shape.vocab_size for place in range(PROMPT_TOKENS)]
            self._scheduler.add(Request(str(number), prompt, sampling, max_tokens=num_passes + 1))
        self._prefill()

    def _prefill(self) -> None:
        while self._scheduler.waiting or any(not it.output_token_ids for it in self._scheduler.running):
            self.run_pass(lambda: None)

    def run_pass(self, chill: Chill) -> _Pass:
        """Return what a pass took, without chilling."""
        self._tiny.prepare()
        chill()
        start = time.perf_counter()
        batch = self._scheduler.schedule()
        hidden, kernels_s = self._forward(batch)
        seconds = time.perf_counter() - start
        chill()
        start = time.perf_counter()
        self._sample(batch, hidden)
        self._scheduler.complete(batch, seconds)
        return _Pass(seconds + time.perf_counter() - start, kernels_s)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, float]:
        """Return hidden states, and the seconds in the call that runs all layers where it does not stop."""
        tokens, context = PassInput.of(batch).tensors(self._kv, torch.device("cpu"))
        model = self._tiny.model
        if self._tiny.comes_from_disk:
            return model(tokens, context), 0.0
        hidden = embedding(tokens, model.embed_tokens)
        work = self._tiny.decoder.begin(hidden, context.positions, self._kv.layers, context.attention)
        start = time.perf_counter()
        work.run()
        kernels_s = time.perf_counter() - start
        assert work.out is not None
        return work.out, kernels_s

    def _sample(self, batch: Batch, hidden: torch.Tensor) -> None:
        entries = [entry for entry in batch.entries if entry.samples]
        if not entries:
            return
        logits = self._tiny.model.logits(hidden[-len(entries) :])  # any rows will do
        samplings = [RowSampling(row, 1.0, number=0.5) for row in range(len(entries))]
        for entry, token_id in zip(entries, sample_rows(logits, samplings), strict=True):
            entry.request.output_token_ids.append(token_id)


def _calm(seconds: Sequence[float]) -> float:
    """Return the lower quartile: what others do meanwhile adds as much as such a short pass takes, or nothing."""
    return sorted(seconds)[len(seconds) // 4]
