"""Experts that several ranks share give the bits of one process that has all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.weight_format import WEIGHT_FORMATS
from moeflow.models.layers.ranks.rank_experts import RankExperts
from moeflow.parallel.placement.expert_balancer import ExpertBalancer
from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.parallel.placement.rebalancing import moves
from moeflow.parallel.placement.whole_experts import WholeExperts
from tests.parallel.thread_group import run_ranks

needs_kernels = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
HIDDEN, WIDTH = 64, 32
FLOATING = ("float32", "bfloat16")


def balancer(num_experts, size):
    return ExpertBalancer(WholeExperts.staying(size, 1, num_experts))


def replicated(num_experts, size, num_homes):
    """A balancer of a placement that has expert e on so many ranks, from rank e on."""
    found = balancer(num_experts, size)
    homes = tuple(tuple(sorted((expert + i) % size for i in range(num_homes))) for expert in range(num_experts))
    found.switch(list(moves(found.placement, ExpertPlacement(size, (homes,)), 1000)))
    return found


@needs_kernels
@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_bits_are_those_of_one_process(weight_format, at_home, data):
    num_experts = data.draw(st.integers(2, 9))
    size, num_tokens = data.draw(st.integers(1, min(num_experts, 4))), data.draw(st.integers(1, 20))
    top_k = data.draw(st.integers(1, min(num_experts, 3)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    gate_up = torch.randn(num_experts, 2 * WIDTH, HIDDEN, generator=generator)
    down = torch.randn(num_experts, HIDDEN, WIDTH, generator=generator)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    residual = torch.randn(num_tokens, HIDDEN, generator=generator) if data.draw(st.booleans()) else None
    weights, ids = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k)
    everything = PackedExperts.pack(gate_up, down, weight_format)
    want = everything.compute(hidden, ids, weights, residual)
    num_homes = data.draw(st.integers(1, size))

    def compute(group):
        placed = replicated(num_experts, size, num_homes)
        held = placed.placement.held_by(group.rank, 0)
        lacking = [0 if expert in held else torch.nan for expert in range(num_experts)]  # never to be touched
        wide = torch.tensor(lacking)[:, None, None]
        if weight_format in FLOATING:
            own = PackedExperts.pack(gate_up + wide, down + wide, weight_format)
        else:
            own = everything
        limit = 0 if at_home else 1 << 40
        return RankExperts(own, 0, placed, group, limit).compute(hidden.clone(), ids, weights, residual)

    found = run_ranks(size, compute)
    assert all(torch.equal(each, want) for each in found)


@needs_kernels
def test_a_rank_fills_its_own_experts_only():
    def parts_of(group):
        return RankExperts(PackedExperts(6, HIDDEN, WIDTH, "bfloat16"), 0, balancer(6, group.size), group).parts()

    (parts,) = run_ranks(1, parts_of)
    assert all(part is not None for part in parts)

    found = run_ranks(3, parts_of)
    assert [[part is not None for part in each] for each in found] == [
        [expert // 2 == rank for expert in range(6)] for rank in range(3)
    ]


@needs_kernels
def test_many_tokens_are_added_up_where_they_are_at_home_so_that_less_travels():
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_experts, size, top_k = 256, 8, 4, 4
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    weights, ids = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k)
    sent = {}
    for limit in (0, 1 << 40):

        def compute(group, limit=limit):
            room = PackedExperts(num_experts, HIDDEN, WIDTH, "bfloat16")
            experts = RankExperts(room, 0, balancer(num_experts, size), group, limit)
            experts.compute(hidden.clone(), ids, weights)
            return group.sent_bytes

        sent[limit] = sum(run_ranks(size, compute))
    pair_bytes = num_tokens * top_k * HIDDEN * 4
    assert sent[1 << 40] == (size - 1) * pair_bytes  # each pair to all others
    home = sum(ids[i].div(2, rounding_mode="floor").ne(i * size // num_tokens).sum().item() for i in range(num_tokens))
    assert sent[0] == home * HIDDEN * 4 + (size - 1) * num_tokens * HIDDEN * 4  # to the token's home, and the sums
