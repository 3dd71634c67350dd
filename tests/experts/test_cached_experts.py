"""Experts from slots answer like resident ones to the bit, whatever is there, arrives first or has to go."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.errors import StorageError
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.policies import POLICIES
from moeflow.experts.cached_experts import ExpertPool
from moeflow.experts.slot_arena import SlotArena
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.expert_slots import SlotExperts
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.weight_format import WEIGHT_FORMATS

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
NUM_LAYERS, NUM_EXPERTS, HIDDEN, WIDTH = 2, 6, 32, 16


class Handle:
    def __init__(self, disk, job):
        self.disk, self.job = disk, job

    def cancel(self):
        self.disk.pending = [entry for entry in self.disk.pending if entry[0] is not self.job]
        return True


class Disk:
    """Reads whenever somebody waits, one at a time, in an order of its own."""

    def __init__(self, layers, arena, seed):
        self.slabs = [expert for layer in layers for expert in layer.storage]
        self.arena = arena
        self.chance = random.Random(seed)
        self.pending = []
        self.bad = set()

    def start_loads(self, jobs, on_done):
        self.pending += [(job, on_done) for job in jobs]
        return [Handle(self, job) for job in jobs]

    def wait(self, condition):
        job, on_done = self.pending.pop(self.chance.randrange(len(self.pending)))
        self.arena.tensor(job.slot)[: len(self.slabs[job.expert])] = self.slabs[job.expert]
        on_done(job, StorageError("damaged") if job.expert in self.bad else None)


@pytest.fixture(scope="module")
def layers():
    def pack(weight_format):
        chance = torch.Generator().manual_seed(0)
        sizes = (2 * WIDTH, HIDDEN)
        biases = ExpertBiases(*(torch.randn(NUM_EXPERTS, size, generator=chance) for size in sizes))
        return [
            PackedExperts.pack(
                torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, generator=chance),
                torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, generator=chance),
                weight_format,
                biases=None if layer == 0 else biases,
            )
            for layer in range(NUM_LAYERS)
        ]

    return {weight_format: pack(weight_format) for weight_format in WEIGHT_FORMATS}


def make_pool(layers, num_slots, policy="lru", seed=0):
    slab_bytes = layers[0].storage.shape[1]
    arena = SlotArena(num_slots, slab_bytes)
    disk = Disk(layers, arena, seed)
    shape = (len(layers), layers[0].num_experts)
    cache = ExpertCache(
        num_layers=shape[0],
        num_experts=shape[1],
        num_slots=num_slots,
        slab_bytes=slab_bytes,
        policy=POLICIES[policy](*shape),
        start_loads=disk.start_loads,
        wait=disk.wait,
    )
    slots = PackedExperts(num_slots, layers[0].hidden, layers[0].width, layers[0].format, storage=arena.slots)
    return ExpertPool(cache, slots), disk


def choose(chance, num_tokens, top_k):
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=chance)[:top_k] for _ in range(num_tokens)])
    return ids, torch.rand(num_tokens, top_k, generator=chance)


@settings(max_examples=25)
@given(
    weight_format=st.sampled_from(WEIGHT_FORMATS),
    policy=st.sampled_from(sorted(POLICIES)),
    num_slots=st.integers(2, NUM_LAYERS * NUM_EXPERTS),
    top_k=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    has_residual=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_bit_is_that_of_resident_experts(
    layers, weight_format, policy, num_slots, top_k, sizes, has_residual, seed
):
    resident = layers[weight_format]
    pool, _ = make_pool(resident, num_slots, policy, seed)
    cached = [pool.add_layer(layer.biases) for layer in resident]
    chance = torch.Generator().manual_seed(seed)
    for num_tokens in sizes:
        pool.cache.begin_pass()
        for experts, oracle in zip(cached, resident, strict=True):
            hidden = torch.randn(num_tokens, HIDDEN, generator=chance)
            residual = torch.randn(num_tokens, HIDDEN, generator=chance) if has_residual else None
            ids, weights = choose(chance, num_tokens, top_k)
            out = experts.compute(hidden, ids, weights, residual)
            assert torch.equal(out, oracle.compute(hidden, ids, weights, residual))
            pool.cache.check_integrity()


def test_resident_experts_come_first_in_a_layer_that_does_not_fit(layers):
    pool, _ = make_pool(layers["int8"], 4)
    experts, chance = pool.add_layer(), torch.Generator().manual_seed(0)
    weights = torch.rand(1, 2, generator=chance)
    experts.compute(torch.randn(1, HIDDEN), torch.tensor([[4, 5]]), weights)
    ids = torch.arange(NUM_EXPERTS).view(3, 2)
    experts.compute(torch.randn(3, HIDDEN), ids, torch.rand(3, 2))
    assert pool.cache.stats().hits == 2


def test_an_expert_that_cannot_be_read_fails_the_pass_and_holds_nothing(layers):
    pool, disk = make_pool(layers["int8"], 3)
    experts = pool.add_layer()
    hidden, ids, weights = torch.randn(4, HIDDEN), torch.tensor([[0, 1], [2, 3], [4, 5], [0, 5]]), torch.rand(4, 2)
    disk.bad = {4}
    with pytest.raises(StorageError, match="damaged"):
        experts.compute(hidden, ids, weights)
    while disk.pending:
        disk.wait(None)
    disk.bad = set()
    pool.cache.check_integrity()
    out = experts.compute(hidden, ids, weights)
    assert torch.equal(out, layers["int8"][0].compute(hidden, ids, weights))


class Heard:
    """A prefetch driver that records what it sees."""

    def __init__(self, disk):
        self.disk, self.calls = disk, []

    def see(self, layer, hidden, ids):
        self.calls.append((layer, len(self.disk.pending), ids.tolist()))


def test_who_watches_hears_of_a_layer_once_its_loads_are_queued(layers):
    pool, disk = make_pool(layers["int8"], 2)
    pool.prefetch = Heard(disk)
    pool.add_layer()
    ids = torch.tensor([[3, 1], [0, 2]])
    pool.add_layer().compute(torch.randn(2, HIDDEN), ids, torch.rand(2, 2))
    assert pool.prefetch.calls == [(1, 2, ids.tolist())]


@pytest.mark.parametrize("sent", [{1}, {0, 1, 2, 3}])
@pytest.mark.parametrize("delivered", ["none", "some", "all"])
def test_who_watches_hears_of_a_layer_once_if_lenders_compute_some_or_all(layers, sent, delivered):
    """Results that lenders do not deliver are computed here, which is no second choice of a router."""
    resident = layers["int8"][0]
    pool, disk = make_pool(layers["int8"], 3)
    pool.prefetch = Heard(disk)
    hidden, ids, weights = torch.randn(2, HIDDEN), torch.tensor([[3, 1], [0, 2]]), torch.rand(2, 2)
    missing = {"none": sent, "some": {1}, "all": set()}[delivered]

    class Sent:
        experts = sent

        def note_computed_here(self, experts):
            assert sent.isdisjoint(experts)

        def collect(self, pairs):
            in_slots = SlotExperts(resident, NUM_EXPERTS, {expert: expert for expert in sent - missing})
            in_slots.pairs(hidden, ids, weights, pairs)
            return sorted(missing)

    pool.remote = SimpleNamespace(send=lambda *_: Sent())
    assert torch.equal(pool.add_layer().compute(hidden, ids, weights), resident.compute(hidden, ids, weights))
    assert [(layer, ids) for layer, _, ids in pool.prefetch.calls] == [(0, ids.tolist())]
    pool.cache.check_integrity()
