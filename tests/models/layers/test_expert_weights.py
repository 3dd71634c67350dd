"""Every kind of expert weights: filled through its parts, it computes what stacked tensors do.

tests/experts/test_cached_experts.py tests experts that are only partly in memory.
"""

from __future__ import annotations

import pytest
import torch

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.experts import fused_experts
from moeflow.models.layers.expert_weights import ExpertSlabs, ExpertTensors, OffloadedExperts, slab_bytes

EXPERTS, HIDDEN, WIDTH = 3, 8, 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_move_as_bytes(dtype):
    num_bytes = slab_bytes(HIDDEN, WIDTH, dtype)
    slabs = ExpertSlabs(HIDDEN, WIDTH, dtype, torch.zeros(EXPERTS, num_bytes, dtype=torch.uint8))
    gate, up, down = (torch.randn(EXPERTS, *shape).to(dtype) for shape in ((WIDTH, HIDDEN),) * 2 + ((HIDDEN, WIDTH),))
    for expert, parts in enumerate(slabs.parts()):
        for part, source in zip(parts, (gate, up, down), strict=True):
            part.copy_(source[expert])
    elsewhere = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(EXPERTS)]
    for row, source in zip(elsewhere, slabs.storage, strict=True):
        row.copy_(source)
    slabs.storage.zero_()
    moved = slabs.at(elsewhere)
    assert moved.num_experts == EXPERTS
    hidden, ids = torch.randn(6, HIDDEN).to(dtype), torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0], [0, 1], [1, 2]])
    weights = torch.rand(6, 2)
    for rows in (slice(6), slice(1)):  # one token goes another way
        chosen = (ids[rows], weights[rows])
        expected = fused_experts(hidden[rows], torch.cat([gate, up], dim=1), down, *chosen)
        assert torch.equal(moved.compute(hidden[rows], *chosen), expected)


def tensors():
    return ExpertTensors(torch.empty(EXPERTS, 2 * WIDTH, HIDDEN), torch.empty(EXPERTS, HIDDEN, WIDTH))


def slabs():
    num_bytes = slab_bytes(HIDDEN, WIDTH, torch.float32)
    return ExpertSlabs(HIDDEN, WIDTH, torch.float32, torch.zeros(EXPERTS, num_bytes, dtype=torch.uint8))


def packed():
    if not extension.is_available():
        pytest.skip(extension.why_not())
    return PackedExperts(EXPERTS, HIDDEN, WIDTH, "float32")


@pytest.mark.parametrize(
    ("make", "is_movable", "is_for_kernels"), [(tensors, False, False), (slabs, True, False), (packed, True, True)]
)
def test_kinds_that_are_filled_compute_the_same(make, is_movable, is_for_kernels):
    experts = make()
    gate, up, down = (torch.randn(EXPERTS, *shape) for shape in ((WIDTH, HIDDEN),) * 2 + ((HIDDEN, WIDTH),))
    assert len(experts.parts()) == EXPERTS
    for expert, parts in enumerate(experts.parts()):
        for part, source in zip(parts, (gate, up, down), strict=True):
            if isinstance(part, torch.Tensor):
                part.copy_(source[expert])
            else:
                part.fill(source[expert], torch.arange(len(source[expert])))
    hidden, residual = torch.randn(4, HIDDEN), torch.randn(4, HIDDEN)
    ids, weights = torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0]]), torch.rand(4, 2)
    expected = fused_experts(hidden, torch.cat([gate, up], dim=1), down, ids, weights)
    kept = residual.clone()
    torch.testing.assert_close(experts.compute(hidden, ids, weights), expected)
    torch.testing.assert_close(experts.compute(hidden, ids, weights, residual), expected + residual)
    assert torch.equal(residual, kept)
    assert experts.movable() is (experts if is_movable else None)
    assert experts.for_kernels() == ((experts, None, None) if is_for_kernels else None)


def test_offloaded_experts_have_nothing_to_fill_and_compute_nothing():
    experts = OffloadedExperts()
    assert list(experts.parts()) == []
    assert (experts.movable(), experts.for_kernels()) == (None, None)
    with pytest.raises(AssertionError, match="no weights"):
        experts.compute(torch.zeros(1, HIDDEN), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
