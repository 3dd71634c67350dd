"""What ranks exchange and compute in each layout, against plain torch and one process, as threads of this process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kernels.cpu import extension
from moeflow.parallel.placement.layouts import LAYOUTS
from studies.parallel.layouts import make_layout
from studies.parallel.meter import SECTIONS, Meter
from studies.parallel.published_layouts import DEEPSPEED, EXACT, PER_EXPERT
from studies.parallel.result import Result
from tests.parallel.thread_group import run_ranks
from tests.studies.parallel.cases import case, plain_sums, shape, weights_of

pytestmark = pytest.mark.skipif(not extension.is_available(), reason="needs the CPU extension")

MEASURED = tuple(name for name in LAYOUTS if name != "replicated")
PUBLISHED = (PER_EXPERT, EXACT, DEEPSPEED)
SPLIT_SUMS = ("sliced", PER_EXPERT, DEEPSPEED)


def run(name, of, shared) -> list[tuple[Result, Meter]]:
    """Return what each rank gets, and its meter."""

    def work(group):
        meter = Meter(group)
        layout = make_layout(name, of, shared, group.rank)
        return layout.run(of.tokens(group.rank), meter), meter

    return run_ranks(of.layer.num_ranks, work)


@st.composite
def cases(draw):
    num_ranks, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    layer = shape(
        num_ranks=num_ranks,
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(num_experts, 3))),
        hidden=draw(st.sampled_from([1, 16, 30])),
        width=draw(st.integers(num_ranks, 37)),
        is_gated=draw(st.booleans()),
    )
    return case(
        layer,
        num_tokens=tuple(draw(st.lists(st.integers(1, 9), min_size=num_ranks, max_size=num_ranks))),
        router_skew=draw(st.floats(0, 1)),
        num_experts_skew=draw(st.integers(1, num_experts)),
        capacity_factor=draw(st.floats(0.1, 3)),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("name", [*MEASURED, *PUBLISHED])
@settings(max_examples=8)
@given(of=cases())
def test_ranks_give_their_tokens_the_sums_of_plain_torch(name, of):
    with weights_of(of.layer) as shared:
        everything = shared.whole(list(range(of.layer.num_experts)))
        for rank, (result, _) in enumerate(run(name, of, shared)):
            tokens = of.tokens(rank)
            assert result.sums.double() == pytest.approx(plain_sums(of.layer, tokens, result.is_kept), abs=1e-4)
            if name not in SPLIT_SUMS:
                kept = 1 if result.is_kept is None else result.is_kept
                alone = everything.compute(tokens.x, tokens.topk_ids, tokens.topk_weights * kept)
                assert torch.equal(result.sums, alone)


@given(of=cases())
@settings(max_examples=8)
def test_only_a_capacity_drops_tokens_and_the_last_of_each_expert(of):
    with weights_of(of.layer) as shared:
        for result, _ in run("capacity-dropless", of, shared):
            assert result.is_kept.all()
        layer = of.layer
        most = max(of.num_tokens)
        capacity = min(int(np.ceil(of.capacity_factor * layer.top_k * most / layer.num_experts)), most)
        for rank, (result, _) in enumerate(run("capacity", of, shared)):
            ids = of.tokens(rank).topk_ids.flatten().tolist()
            expected = [ids[:place].count(expert) < capacity for place, expert in enumerate(ids)]
            assert result.is_kept.flatten().tolist() == expected


def test_a_row_travels_once_to_a_rank_and_a_pair_comes_back_for_each_expert():
    """Two ranks of two experts each; both of a token's experts are on one rank where they are 0, 1 or 2, 3."""
    layer = shape(num_ranks=2, num_experts=4, hidden=16)
    of = case(layer, num_tokens=(6, 6), router_skew=0.5, num_experts_skew=2)
    with weights_of(layer) as shared:
        for rank, (_, meter) in enumerate(run("expert", of, shared)):
            own, theirs = of.tokens(rank).topk_ids // 2, of.tokens(1 - rank).topk_ids // 2
            rows, pairs = int((own != rank).any(dim=1).sum()), int((theirs == rank).sum())
            assert meter.sent_bytes == rows * (16 * 4 + 2 * 8) + pairs * 16 * 4


def test_slices_send_every_row_once_to_each_rank_and_partial_sums_home():
    of = case(num_tokens=(1, 4, 2))
    with weights_of(of.layer) as shared:
        sent = [meter.sent_bytes for _, meter in run("sliced", of, shared)]
    row, choices = 24 * 4, 2 * 8
    assert sent == [2 * own * (row + choices) + (7 - own) * row for own in (1, 4, 2)]


def test_padding_is_sent_whatever_is_routed():
    of = case(num_tokens=(10, 10, 10), capacity_factor=0.5)  # two rows for an expert of each rank
    with weights_of(of.layer) as shared:
        metered = [meter for _, meter in run("capacity", of, shared)]
        held = [sum(1 for _ in make_layout("capacity", of, shared, rank)._own) for rank in range(3)]
    assert [meter.sent_bytes for meter in metered] == [((5 - num) * 2 + num * 2 * 2) * 24 * 4 for num in held]


def test_uneven_slices_are_one_unit_apart_and_make_up_the_expert():
    layer = shape(width=20)
    with weights_of(layer) as shared:
        gate_up, down = shared.whole([4]).unpack()
        slices = [shared.slices(rank) for rank in range(3)]
        assert sorted(own.width for own in slices) == [6, 7, 7]
        parts = [own.unpack() for own in slices]
    assert torch.equal(torch.cat([part[4, : len(part[4]) // 2] for part, _ in parts]), gate_up[0, :20])
    assert torch.equal(torch.cat([part[4, len(part[4]) // 2 :] for part, _ in parts]), gate_up[0, 20:])
    assert torch.equal(torch.cat([part[4] for _, part in parts], dim=1), down[0])


def test_every_section_is_timed_from_where_all_ranks_are():
    of = case()
    with weights_of(of.layer) as shared:
        for name in MEASURED:
            for _, meter in run(name, of, shared):
                assert tuple(meter.seconds) == SECTIONS
                assert meter.seconds["route"] == 0
                assert all(meter.seconds[section] > 0 for section in SECTIONS[1:])
