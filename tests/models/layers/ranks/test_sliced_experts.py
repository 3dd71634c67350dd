"""Slices of experts give the bits of whole ones, wherever they are cut, and take no more memory than they need."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.weight_format import WEIGHT_FORMATS
from moeflow.models.layers.allocation.expert_homes import SlicedOnRanks
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.expert_weights import ExpertWeights
from moeflow.models.layers.weight_allocator import ExpertShape
from tests.parallel.thread_group import run_ranks

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
NUM_EXPERTS = 4


def sliced(group, weight_format, gate_up, down, *, is_wide) -> ExpertWeights:
    """Return what a rank has of experts, filled as a loader fills it."""
    formats = WeightFormats(weight_format, weight_format, is_wide=is_wide)
    allocator = PackedAllocator(torch.float32, torch.device("cpu"), formats, home=SlicedOnRanks(group))
    num_experts, hidden, width = down.shape
    experts = allocator.experts(ExpertShape(num_experts, hidden, width))
    for part, up, back in zip(experts.parts(), gate_up, down, strict=True):
        for rows, source in zip(part, (*up.chunk(2), back), strict=True):
            numbers = torch.arange(rows.first, rows.first + rows.shape[0])
            rows.fill(source[numbers], numbers)
    return experts


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_bits_are_those_of_one_process(weight_format, data):
    hidden, width = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 100))
    size, num_tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20))
    top_k, is_wide = data.draw(st.integers(1, NUM_EXPERTS)), data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    gate_up = torch.randn(NUM_EXPERTS, 2 * width, hidden, generator=generator)
    down = torch.randn(NUM_EXPERTS, hidden, width, generator=generator)
    x = torch.randn(num_tokens, hidden, generator=generator)
    residual = torch.randn(num_tokens, hidden, generator=generator) if data.draw(st.booleans()) else None
    weights, ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(top_k)
    want = PackedExperts.pack(gate_up, down, weight_format, is_wide=is_wide).compute(x, ids, weights, residual)

    def compute(group):
        return sliced(group, weight_format, gate_up, down, is_wide=is_wide).compute(x, ids, weights, residual)

    assert all(torch.equal(found, want) for found in run_ranks(size, compute))


def test_what_travels_does_not_depend_on_what_routers_choose():
    hidden, width, num_tokens, top_k, size = 64, 96, 30, 2, 3
    gate_up, down = torch.randn(NUM_EXPERTS, 2 * width, hidden), torch.randn(NUM_EXPERTS, hidden, width)
    x, weights = torch.randn(num_tokens, hidden), torch.ones(num_tokens, top_k)
    even = torch.rand(num_tokens, NUM_EXPERTS).argsort(dim=1)[:, :top_k].contiguous()
    skewed = torch.tensor([[1, 3]]).repeat(num_tokens, 1)

    def sent_bytes(group, ids):
        sliced(group, "bfloat16", gate_up, down, is_wide=False).compute(x, ids, weights)
        return group.sent_bytes

    for ids in (even, skewed):
        own_outputs = torch.tensor([16, 16, 32])  # of 4 bands
        own = num_tokens * top_k * width // size + num_tokens * own_outputs
        assert run_ranks(size, partial(sent_bytes, ids=ids)) == (own * 4 * (size - 1)).tolist()


def test_a_pass_without_tokens_gives_none():
    gate_up, down = torch.randn(NUM_EXPERTS, 64, 32), torch.randn(NUM_EXPERTS, 32, 32)

    def compute(group):
        experts = sliced(group, "float32", gate_up, down, is_wide=False)
        return experts.compute(torch.empty(0, 32), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))

    assert [found.shape for found in run_ranks(2, compute)] == [(0, 32)] * 2
