"""Real experts as slabs: packed, written, read through a cache that is too small, and computed with, to the bit."""

from __future__ import annotations

import pytest
import torch

from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.checkpoint.packed.reader import SlabReader
from moeflow.checkpoint.packed.writer import build_packed_weights_file
from moeflow.experts.cache.eviction import LRU
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.disk_reader import DiskReader
from moeflow.experts.slot_arena import SlotArena
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.weight_format import WEIGHT_FORMATS
from tests.checkpoint.packed.slabs import make_spec

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 6, 96, 40, 2


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_experts_from_disk_answer_like_resident_ones(tmp_path, weight_format):
    chance = torch.Generator().manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, generator=chance)
    down = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, generator=chance)
    resident = PackedExperts.pack(gate_up, down, weight_format)
    slabs = resident.storage.view(NUM_EXPERTS, -1)
    slab_bytes = slabs.shape[1]
    spec = make_spec(weight_format=weight_format, num_layers=1, num_experts=NUM_EXPERTS, slab_bytes=slab_bytes)
    with build_packed_weights_file(tmp_path / "slabs", spec) as writer:
        for layer, expert in writer.missing():
            writer.write(layer, expert, slabs[expert].numpy().data)

    arena = SlotArena(3, slab_bytes)
    reader = SlabReader(read_slab_index(tmp_path / "slabs"), arena.view(0))
    disk = DiskReader(reader, arena, num_threads=2)
    cache = ExpertCache(
        num_layers=1,
        num_experts=NUM_EXPERTS,
        num_slots=3,
        slab_bytes=slab_bytes,
        policy=LRU(NUM_EXPERTS),
        start_loads=disk.start_loads,
        wait=disk.wait,
    )
    disk.serve(cache)
    for _ in range(20):
        x = torch.randn(1, HIDDEN, generator=chance)
        topk_ids = torch.randperm(NUM_EXPERTS, generator=chance)[:TOP_K].view(1, TOP_K)
        topk_weights = torch.rand(1, TOP_K, generator=chance)
        streamed = PackedExperts(NUM_EXPERTS, HIDDEN, WIDTH, weight_format)
        with cache.acquire(0, topk_ids[0].tolist()) as lease:
            lease.wait()
            for expert, slot in lease.slots.items():
                streamed.storage.view(NUM_EXPERTS, -1)[expert] = arena.tensor(slot)[:slab_bytes]
            out = streamed.compute(x, topk_ids, topk_weights)
        assert torch.equal(out, resident.compute(x, topk_ids, topk_weights))
    assert cache.stats().evictions > 0
    disk.close()
    reader.close()
