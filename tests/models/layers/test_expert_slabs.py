"""Experts in rows of bytes: filled through their parts, moved as bytes, they compute what stacked tensors do."""

from __future__ import annotations

import pytest
import torch

from moeflow.kernels.experts import fused_experts
from moeflow.models.layers.expert_slabs import ExpertSlabs, slab_bytes

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
        assert torch.equal(fused_experts(hidden[rows], moved.gate_up, moved.down, *chosen), expected)
