"""The CPU's experts from slots that a disk fills: every bit is that of experts in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeflow.experts.cached_experts import CachedExperts
from moeflow.experts.hybrid.disk_experts import _CachedSums
from moeflow.experts.hybrid.resident_runs import ResidentRuns
from moeflow.experts.hybrid.slot_tables import NO_SLOT
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.expert_slots import PresentExperts
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.expert_biases import ExpertBiases
from tests.experts.test_cached_experts import make_pool

pytestmark = pytest.mark.skipif(not extension.is_available(), reason="no kernels here")

LAYERS, EXPERTS, HIDDEN, WIDTH = 3, 6, 32, 16


@pytest.mark.parametrize("num_slots", [2, 5, 11, LAYERS * EXPERTS])
@pytest.mark.parametrize("weight_format", ["float32", "int4"])
def test_every_bit_is_that_of_experts_in_memory(monkeypatch, num_slots, weight_format):
    chance = torch.Generator().manual_seed(num_slots)
    packed, biases = [], []
    for _ in range(LAYERS):
        sizes = ((EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, 2 * WIDTH), (EXPERTS, HIDDEN))
        up, down, *of_layer = (torch.randn(size, generator=chance) for size in sizes)
        packed.append(PackedExperts.pack(up, down, weight_format))
        biases.append(ExpertBiases(*of_layer))
    pool, _ = make_pool(packed, num_slots, "next-use")
    runs, on_gpu = ResidentRuns(pool.cache), np.full((LAYERS, EXPERTS), NO_SLOT, np.int32)
    layers = [_CachedSums(pool.add_layer(of_layer), runs, on_gpu[layer], 0) for layer, of_layer in enumerate(biases)]
    num_needed = num_late = 0
    compute_others = CachedExperts.compute_others

    def counted(*given):
        nonlocal num_late
        num_late += 1
        return compute_others(*given)

    monkeypatch.setattr(CachedExperts, "compute_others", counted)
    for number in range(12):
        pool.cache.begin_pass()
        on_gpu[:] = np.where(torch.rand(LAYERS, EXPERTS, generator=chance) < 0.3, 0, NO_SLOT)
        pool.cache.leave((on_gpu != NO_SLOT).ravel())
        for layer, cached in enumerate(layers):
            num_tokens = 1 + number % 4
            hidden, weights = torch.randn(num_tokens, HIDDEN, generator=chance), torch.rand(num_tokens, 2)
            ids = torch.rand(num_tokens, EXPERTS, generator=chance).argsort(1)[:, :2].contiguous()
            table = np.where(on_gpu[layer] == NO_SLOT, np.arange(EXPERTS, dtype=np.int32), NO_SLOT).astype(np.int32)
            out, expected = (torch.full((num_tokens, HIDDEN), torch.nan) for _ in range(2))
            cached.sums(hidden, ids, weights, out)()
            PresentExperts(packed[layer], table, biases[layer]).sums(hidden, ids, weights, expected)()
            assert torch.equal(out, expected)
            num_needed += len({*ids.flatten().tolist()} & {*np.flatnonzero(on_gpu[layer] == NO_SLOT).tolist()})
        runs.end()
        pool.cache.check_integrity()
    stats = pool.cache.stats()
    assert stats.hits + stats.late + stats.misses == num_needed
    if num_slots == LAYERS * EXPERTS:
        assert 0 < num_late < 12 * LAYERS
