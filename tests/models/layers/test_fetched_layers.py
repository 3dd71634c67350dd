"""Experts that come from a real file while kernels run: bits, counts and what happens when that cannot be."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.checkpoint.packed.reader import SlabReader
from moeflow.checkpoint.packed.writer import build_packed_weights_file
from moeflow.core.errors import StorageError
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.policies import POLICIES
from moeflow.experts.cached_experts import CachedExperts, ExpertPool
from moeflow.experts.disk_reader import DiskReader
from moeflow.experts.predict.predictor import RoutedModel
from moeflow.experts.predict.registry import NO_PREDICTOR, PREDICTORS
from moeflow.experts.prefetch.driver import PrefetchDriver
from moeflow.experts.prefetch.layer_source import LayerSource
from moeflow.experts.slot_arena import SlotArena
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.models.families.qwen3_moe import build
from moeflow.models.layers.allocation.expert_homes import InCache
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.moe import MoE
from tests.checkpoint.packed.slabs import flip_bit, make_spec, read_slab_index
from tests.models.layers.test_packed_layers import (
    CONFIG,
    NUM_EXPERTS,
    NUM_LAYERS,
    PREDICTOR_NAMES,
    AlwaysOn,
    fill,
    resident,
    resident_model,
    run,
    sequences,
    slabs_of,
)

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
ALL = NUM_LAYERS * NUM_EXPERTS
TOKENS = st.lists(sequences.map(lambda tokens: tokens[:1]), min_size=1, max_size=2)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    slabs = slabs_of(resident_model("float32"))
    spec = make_spec(weight_format="float32", num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, slab_bytes=len(slabs[0]))
    file = tmp_path_factory.mktemp("slabs") / "slabs"
    with build_packed_weights_file(file, spec) as writer:
        for layer, expert in writer.missing():
            writer.write(layer, expert, slabs[layer * NUM_EXPERTS + expert].numpy().data)
    return read_slab_index(file)


class Fetched:
    """The model of test_packed_layers over a few slots and a file; `is_lent`: slots are lent to kernels."""

    def __init__(self, index, num_slots, policy="lru", predictor=NO_PREDICTOR, *, num_threads=2, is_lent=True):
        self.arena = arena = SlotArena(num_slots, index.spec.slab_bytes)
        arena.slots.fill_(255)  # not a number
        self.file = SlabReader(index, arena.view(0))
        self.disk = DiskReader(self.file, arena, num_threads=num_threads)
        self.cache = ExpertCache(
            num_layers=NUM_LAYERS,
            num_experts=NUM_EXPERTS,
            num_slots=num_slots,
            slab_bytes=index.spec.slab_bytes,
            policy=POLICIES[policy](NUM_LAYERS, NUM_EXPERTS),
            start_loads=self.disk.start_loads,
            wait=self.disk.wait,
        )
        slots = PackedExperts(
            num_slots, CONFIG.hidden_size, CONFIG.feed_forward.intermediate_size, "float32", storage=arena.slots
        )
        self.pool = ExpertPool(self.cache, slots)
        self.pool.fetcher = self.disk
        self.disk.serve(self.cache)
        if not is_lent:
            self.pool.lend_slots = lambda *_: None
        formats = WeightFormats("float32", "float32")
        self.model = build(
            CONFIG, PackedAllocator(torch.float32, torch.device("cpu"), formats, home=InCache(self.pool))
        )
        fill(self.model)
        if predictor != NO_PREDICTOR:
            routers = [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, MoE)]
            made = PREDICTORS[predictor](RoutedModel(NUM_LAYERS, NUM_EXPERTS, routers))
            self.pool.prefetch = PrefetchDriver(self.cache, [LayerSource(AlwaysOn(), NUM_EXPERTS, made)])

    def run(self, batch):
        self.cache.begin_pass()
        try:
            return run(self.model, batch)
        finally:
            self.cache.check_integrity()

    def counts(self):
        """The counts that do not depend on the disk's speed without prefetch."""
        it = self.cache.stats()
        return it.hits, it.late, it.misses, it.evictions, it.demand_bytes

    def close(self):
        self.cache.drain()
        self.cache.check_integrity()
        self.disk.close()
        self.file.close()


@pytest.fixture
def make(index):
    made = []

    def make(*args, **options):
        made.append(Fetched(index, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def stops(monkeypatch):
    """The layers that kernels have left to Python."""
    seen = []
    compute = CachedExperts.compute
    monkeypatch.setattr(CachedExperts, "compute", lambda self, *args: seen.append(self.layer) or compute(self, *args))
    return seen


runs = given(
    policy=st.sampled_from(sorted(POLICIES)),
    predictor=st.sampled_from(PREDICTOR_NAMES),
    num_slots=st.integers(2, ALL),
    num_threads=st.sampled_from([0, 1, 3]),
    passes=st.lists(st.lists(sequences, min_size=1, max_size=3), min_size=1, max_size=10),
)


def check_bits(index, policy, predictor, num_slots, num_threads, passes):
    fetched = Fetched(index, num_slots, policy, predictor, num_threads=num_threads)
    for batch in passes:
        assert torch.equal(fetched.run(batch), run(resident_model("float32"), batch))
    fetched.close()


test_every_bit_is_that_of_the_resident_model = settings(max_examples=60)(runs(check_bits))
test_every_bit_of_many_runs = pytest.mark.thorough(settings(max_examples=500)(runs(check_bits)))


@settings(max_examples=15)
@given(num_slots=st.integers(2, ALL), passes=st.lists(TOKENS, max_size=20), policy=st.sampled_from(["next-use", "lru"]))
def test_the_cache_knows_what_it_would_know_without_lending(index, num_slots, passes, policy):
    fetched, oracle = Fetched(index, num_slots, policy), Fetched(index, num_slots, policy, is_lent=False)
    for batch in passes:
        assert torch.equal(fetched.run(batch), oracle.run(batch))
        assert fetched.counts() == oracle.counts()
        assert resident(fetched.cache) == resident(oracle.cache)
    fetched.close()
    oracle.close()


@pytest.mark.parametrize("predictor", [NO_PREDICTOR, "next-router"])
def test_a_pass_that_lacks_experts_is_one_call(make, stops, predictor):
    fetched = make(ALL - 4, predictor=predictor)
    for token in range(CONFIG.vocab_size):
        fetched.run([[token]])
    it = fetched.cache.stats()
    assert stops == []
    assert it.misses + it.late > 10
    assert it.evictions > 10
    assert (it.prefetched_bytes > 0) == (predictor != NO_PREDICTOR)
    assert it.used_bytes <= it.prefetched_bytes
    assert it.demand_bytes == it.misses * fetched.file.index.spec.slab_bytes
    assert it.stall_s > 0


def test_too_few_slots_for_a_pass_leave_its_rest_to_python(make, stops):
    fetched = make(3)
    for token in range(10):
        batch = [[token]]
        assert torch.equal(fetched.run(batch), run(resident_model("float32"), batch))
    assert 0 < len(stops) < 10 * NUM_LAYERS


def test_nobody_else_gets_slots_that_are_lent(make):
    fetched = make(5)
    cache = fetched.cache
    cache.kernel_reads.begin()
    cache.kernel_reads.lend(5, max_needed=NUM_EXPERTS)
    assert cache.prefetch(0, [1, 2]) == 0
    cache.kernel_reads.end(0, np.zeros((0, 1, 1), np.int64))
    assert cache.prefetch(0, [1, 2]) == 2


def test_an_expert_that_is_on_its_way_is_waited_for(make, stops):
    fetched = make(ALL, num_threads=0)  # nothing is read before somebody waits
    fetched.cache.prefetch_pass(list(range(ALL)))
    batch = [[3]]
    assert torch.equal(fetched.run(batch), run(resident_model("float32"), batch))
    assert stops == []
    it = fetched.cache.stats()
    assert it.cancelled_loads > 0  # to be read on demand
    assert it.demand_bytes == it.misses * fetched.file.index.spec.slab_bytes


def test_a_damaged_expert_fails_the_pass_and_the_next_one_is_right(index, tmp_path):
    file = tmp_path / "slabs"
    file.write_bytes(index.path.read_bytes())
    damaged = Fetched(read_slab_index(file), ALL)
    batch = [[1]]
    for number in range(ALL):
        flip_bit(file, index.spec.offset(number) + 100)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"layer 0, expert \d: .*checksums differ"):
            damaged.run(batch)
    for number in range(ALL):
        flip_bit(file, index.spec.offset(number) + 100)
    assert torch.equal(damaged.run(batch), run(resident_model("float32"), batch))
    os.truncate(file, index.spec.offset(NUM_EXPERTS))
    damaged.cache.resize(2, damaged.arena.copy)  # most have to be read again
    with pytest.raises(StorageError, match="it was cut"):
        damaged.run([[token] for token in range(3)])
    damaged.close()


def test_a_reader_that_is_closed_fails_the_pass(make):
    fetched = make(ALL)
    fetched.disk.close()
    with pytest.raises(StorageError, match="stopping"):
        fetched.run([[1]])
