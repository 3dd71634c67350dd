"""Layouts of experts over ranks, against sums worked out by hand and the formulas of the literature.

The round machine: a device reads 100 GB/s and computes 10 TFLOP/s, a rank's link has 1 GB/s. Of the small model, a row
is 1024 bytes, an expert 3 * 512 * 512 values of two bytes, a router 512 * 8.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.hardware import KernelEfficiency, Link, LinkRate, MemoryLevel
from moeflow.planner.costs.model_costs import ModelCosts
from studies.parallel.layer_cost import ParallelLayer, layer_cost, rank_link
from studies.parallel.skew_router import SkewRouter
from tests.planner.examples import HALF, SMALL, machine

ROUND = machine(ram=10**10, device=10**10)
ROUTE_S, EXPERT_S = 2 * 512 * 8 / 1e11, 2 * 3 * 512 * 512 / 1e11  # of reading
ROW_S = 1024 / 1e9
CHOICES_S = 2 * 8 / 1e9  # of two experts and their weights
COPY_S = 2 * 1024 / 1e11  # of a row, read and written
ALL_ON_TWO = np.tile([0, 1], (8, 1))


def layer(topk_ids, num_ranks=4, shape=SMALL, loads=None, **others) -> ParallelLayer:
    fields = {
        "level": ROUND.compute_level,
        "link": rank_link(ROUND, 1e9),
        "costs": ModelCosts(shape.with_fields(top_k=topk_ids.shape[1]), HALF),
        "num_ranks": num_ranks,
        "topk_ids": topk_ids,
        "loads": np.ones(shape.routing.num_experts) if loads is None else loads,
        "capacity_factor": 2.0,
    }
    return ParallelLayer(**{**fields, **others})


def check(cost, sections, sent_rows) -> None:
    """Compare seconds of sections and rows of 1024 bytes that each of four ranks sends."""
    assert list(cost.sections) == list(sections)
    for name, expected in sections.items():
        assert cost.sections[name] == pytest.approx(np.broadcast_to(expected, 4)), name
    assert cost.sent_bytes / 1024 == pytest.approx(np.broadcast_to(sent_rows, 4))


def test_replicated_experts_are_read_by_every_rank_and_nothing_is_sent():
    cost = layer_cost("replicated", layer(ALL_ON_TWO))
    check(cost, {"experts": ROUTE_S + 2 * EXPERT_S}, 0)
    assert cost.num_flops.tolist() == [2 * 4 * 3 * 512 * 512] * 4
    assert cost.weight_bytes.tolist() == [8 * 2 * 3 * 512 * 512] * 4


def test_a_token_goes_once_to_a_rank_that_has_two_of_its_experts():
    """And a result of each comes back. Rank 0 has both, and gets two rows from each of the others."""
    cost = layer_cost("expert", layer(ALL_ON_TWO))
    rows, arrived = np.array([6, 2, 2, 2]), np.array([8, 0, 0, 0])
    sections = {
        "route": ROUTE_S,
        "dispatch": rows * (ROW_S + CHOICES_S) + (2 + arrived) * COPY_S,
        "experts": [2 * EXPERT_S, 0, 0, 0],
        "combine": 2 * rows * ROW_S + (2 * arrived + 2 * 4) * COPY_S,
    }
    choices = 2 * 8 / 1024
    check(cost, sections, [12, 2 + 2 * choices, 2 + 2 * choices, 2 + 2 * choices])
    assert cost.num_flops.tolist() == [2 * 16 * 3 * 512 * 512, 0, 0, 0]
    assert cost.weight_bytes.tolist() == [2 * 2 * 3 * 512 * 512] * 4
    assert cost.num_dropped == 0


def test_a_token_goes_to_each_rank_that_has_some_of_its_experts():
    ids = np.array([[0, 2], [4, 5], [0, 7], [2, 3], [4, 5], [4, 6], [6, 0], [1, 7]])  # two tokens a rank, in order
    cost = layer_cost("expert", layer(ids))
    sent = np.array([2, 2, 1, 2])  # to ranks 1 and 2; to 0 and 3; to 3; both to 0
    received = np.array([3, 1, 1, 2])
    chosen, arrived = np.array([3, 3, 3, 4]), np.array([4, 2, 3, 4])  # a rank's own rows are copied, too
    expected = np.maximum(sent, received) * (ROW_S + CHOICES_S) + (chosen + arrived) * COPY_S
    assert cost.sections["dispatch"] == pytest.approx(expected)
    assert cost.sent_bytes / 1024 == pytest.approx(sent * (1 + 16 / 1024) + [3, 1, 2, 2])  # [4, 5]: two results


def test_a_hot_expert_gets_replicas_in_the_slot_more_that_each_rank_has():
    loads = np.array([90.0, 1, 1, 1, 1, 1, 1, 1])
    cost = layer_cost("expert-by-load", layer(np.zeros((8, 1), int), loads=loads))
    assert cost.weight_bytes.tolist() == [3 * 2 * 3 * 512 * 512] * 4
    assert cost.num_flops.tolist() == [2 * 2 * 3 * 512 * 512] * 4
    assert cost.sections["experts"] == pytest.approx(np.full(4, EXPERT_S))
    uneven = layer_cost("expert-by-load", layer(np.zeros((8, 1), int), 3, loads=loads))
    assert uneven.weight_bytes.max() == 4 * 2 * 3 * 512 * 512


def test_padded_experts_cost_the_same_whatever_is_chosen_and_drop_the_rest():
    """Each rank may send an expert 2 * 2 * 2 / 8 = 1 row."""
    cost = layer_cost("capacity", layer(ALL_ON_TWO))
    copied = 8 + 4 + 8, 8 + 8 + 3 * 4  # rows of this rank, those of its experts, and pairs of its tokens
    sections = {
        "route": ROUTE_S,
        "dispatch": 6 * ROW_S + copied[0] * COPY_S,
        "experts": 2 * EXPERT_S,
        "combine": 6 * ROW_S + copied[1] * COPY_S,
    }
    check(cost, sections, 12)
    assert cost.num_dropped == 8
    assert cost.num_flops.tolist() == [2 * 8 * 3 * 512 * 512] * 4
    even = layer_cost("capacity", layer(np.arange(16).reshape(8, 2) % 8))
    assert even.num_dropped == 0
    check(even, sections, 12)


def test_no_expert_is_padded_beyond_the_tokens_of_a_rank():
    cost = layer_cost("capacity", layer(ALL_ON_TWO, capacity_factor=50))
    assert cost.num_dropped == 0
    assert cost.num_flops.tolist() == [2 * 16 * 3 * 512 * 512] * 4


def test_room_for_the_largest_load_drops_none():
    ids = np.concatenate([ALL_ON_TWO[:6], [[0, 2], [3, 4]]])  # no expert gets more than two rows of a rank
    cost = layer_cost("capacity-dropless", layer(ids, capacity_factor=0.1))
    assert cost.num_dropped == 0
    assert cost.num_flops.tolist() == [2 * 2 * 4 * 2 * 3 * 512 * 512] * 4
    assert layer_cost("capacity", layer(ids, capacity_factor=0.1)).num_dropped == 6


def test_slices_of_all_used_experts_see_all_tokens():
    cost = layer_cost("sliced", layer(ALL_ON_TWO))
    ring = 3 * 2 * ROW_S
    sections = {
        "route": ROUTE_S,
        "dispatch": ring + 3 * 2 * CHOICES_S + 8 * COPY_S,
        "experts": 2 * EXPERT_S / 4,
        "combine": ring + 8 * COPY_S,
    }
    check(cost, sections, 2 * 6 + 3 * 2 * 16 / 1024)
    assert cost.num_flops.tolist() == [2 * 16 * 3 * 512 * 128] * 4
    assert cost.weight_bytes.tolist() == [8 * 2 * 3 * 512 * 128] * 4


def test_messages_go_at_the_rate_of_their_size():
    sizes = {1024: 1e8, 2048: 2e8, 4096: 1e9}
    rates = tuple(LinkRate(transfer_bytes=size, bytes_per_s=rate) for size, rate in sizes.items())
    link = Link(source="rank", target="rank", rates=rates)
    ids = np.tile([[0], [2], [4], [6]], (4, 1))  # each rank sends a row to each other
    copies_s = np.array([4, 8, 1]) * 2 * COPY_S + np.array([4, 8, 1]) * COPY_S  # by source; in place and added up
    cost = layer_cost("expert", layer(ids, link=link))
    assert cost.sections["combine"] == pytest.approx(np.full(4, 3 * 1024 / 1e8 + copies_s[0]))
    more = layer_cost("expert", layer(np.tile(ids, (2, 1)), link=link))
    assert more.sections["combine"] == pytest.approx(np.full(4, 3 * 2048 / 2e8 + copies_s[1]))
    few = layer_cost("expert", layer(np.tile([[0]], (4, 1)), link=link))  # three ranks have one row to send
    assert few.sections["combine"][1:] == pytest.approx(np.full(3, 1024 / 1e8 + 2 * COPY_S))
    ring = layer_cost("sliced", layer(ids, link=link)).sections["combine"]
    assert ring == pytest.approx(np.full(4, 3 * 4096 / 1e9 + 16 * COPY_S))


@pytest.mark.parametrize(("num_ranks", "distinct"), [(2, 1.99), (4, 3.60), (8, 5.25)])
def test_volumes_are_those_of_the_literature(num_ranks, distinct):
    """B/P (r + k) H b: k = 8 even experts hit `distinct` ranks, r of them remote. Slices: 2 (P-1)/P B H b."""
    shape = SMALL.with_fields(num_experts=1024)
    router = SkewRouter(num_experts=1024, top_k=8, router_skew=1.0, num_experts_skew=1024)
    at = layer(router.route(8000), num_ranks, shape)
    remote = (num_ranks - 1) / num_ranks
    sent = layer_cost("expert", at).sent_bytes.mean()
    expected = 8000 / num_ranks * remote * (distinct * (1024 + 64) + 8 * 1024)
    assert sent == pytest.approx(expected, rel=0.01)
    gathered = layer_cost("sliced", at).sent_bytes - (num_ranks - 1) * 8000 / num_ranks * 64
    assert gathered == pytest.approx(np.full(num_ranks, 2 * (num_ranks - 1) / num_ranks * 8000 * 1024))


@given(st.floats(0, 1), st.integers(1, 8), st.integers(1, 40), st.integers(0, 50), st.integers(1, 200))
def test_slices_are_balanced_at_any_skew_to_a_column(skew, num_hot, num_ranks, seed, num_tokens):
    router = SkewRouter(num_experts=8, top_k=2, router_skew=skew, num_experts_skew=num_hot, seed=seed)
    at = layer(router.route(num_tokens), num_ranks)
    cost = layer_cost("sliced", at)
    column = 2 * num_tokens * 2 * 3 * 512
    assert cost.num_flops.max() - cost.num_flops.min() <= column
    total = 2 * num_tokens * 2 * 3 * 512 * 512
    for name in ("replicated", "expert", "expert-by-load", "sliced"):
        assert layer_cost(name, at).num_flops.sum() == pytest.approx(total), name
        assert layer_cost(name, at).num_dropped == 0


def test_more_ranks_than_experts_and_tokens_leave_some_without_work():
    at = layer(ALL_ON_TWO[:3], num_ranks=10)
    expert, capacity = layer_cost("expert", at), layer_cost("capacity", at)
    assert (expert.num_flops > 0).tolist() == [False, True, True] + 7 * [False]
    assert (capacity.weight_bytes > 0).tolist() == 2 * ([False] + 4 * [True])
    assert (layer_cost("replicated", at).num_flops > 0).tolist() == 3 * [True] + 7 * [False]


def test_one_rank_sends_nothing_and_all_layouts_compute_the_same():
    at = layer(ALL_ON_TWO, num_ranks=1, capacity_factor=8)
    for name in ("replicated", "expert", "expert-by-load", "sliced"):
        cost = layer_cost(name, at)
        assert cost.sent_bytes.tolist() == [0]
        computing_s = sum(cost.sections[name][0] for name in ("route", "experts") if name in cost.sections)
        assert computing_s == pytest.approx(ROUTE_S + 2 * EXPERT_S)


def test_without_a_rate_ranks_exchange_through_the_hosts_memory():
    uneven = dataclasses.replace(
        ROUND,
        links=tuple(
            dataclasses.replace(link, rates=(LinkRate(transfer_bytes=1, bytes_per_s=5e8),))
            if link.target == "ram"
            else link
            for link in ROUND.links
        ),
    )
    assert rank_link(uneven, None).seconds(1e9) == 2
    assert rank_link(uneven, 2e9).seconds(1e9) == 0.5


def test_ranks_of_a_host_copy_what_they_send_and_what_they_get():
    host = machine(ram=10**10)
    assert rank_link(host, None) is None
    at = layer(ALL_ON_TWO, level=host.compute_level, link=None)
    copy_s = 2 * 1024 / host.compute_level.read_bytes_per_s
    expert, sliced = layer_cost("expert", at), layer_cost("sliced", at)
    rows, arrived = np.array([6, 2, 2, 2]), np.array([8, 0, 0, 0])
    assert expert.sections["dispatch"] == pytest.approx((rows * (1 + 16 / 1024) + 2 + arrived) * copy_s)
    assert sliced.sections["combine"] == pytest.approx(np.full(4, 2 * 8 * copy_s))


def with_efficiencies(level: MemoryLevel, *points: tuple[float, float]) -> MemoryLevel:
    """Return a level whose kernel for experts was measured at these numbers of rows."""
    found = tuple(KernelEfficiency(kernel="experts", dtype="float16", rows=rows, share=share) for rows, share in points)
    return dataclasses.replace(level, processor=dataclasses.replace(level.processor, efficiencies=found))


def test_experts_take_what_they_take_at_their_own_rows():
    """One expert has one row, the other three; the share of the roof halves in between."""
    level = with_efficiencies(ROUND.compute_level, (1, 1.0), (3, 0.5))
    at = layer(np.array([[0], [1], [1], [1]]), num_ranks=1, level=level)
    assert layer_cost("expert", at).sections["experts"] == pytest.approx([EXPERT_S + 2 * EXPERT_S])


def test_large_calls_of_a_measured_kernel_pass_their_activations_through_memory():
    level = with_efficiencies(ROUND.compute_level, (1, 1.0), (512, 1.0))
    unmeasured, measured = (
        [
            layer_cost("expert", layer(np.zeros((num_tokens, 1), int), num_ranks=1, level=it)).sections["experts"][0]
            for num_tokens in (512, 513)
        ]
        for it in (ROUND.compute_level, level)
    )
    hidden_bytes = 512 * (2 + 2 * 2 + 5 * 2)  # a row of 512, all numbers of two bytes
    unit_bytes = 512 * (2 * 2 + 2 * 2)
    assert measured[0] == pytest.approx(unmeasured[0])
    assert measured[1] - unmeasured[1] == pytest.approx(513 * (hidden_bytes + unit_bytes) / 1e11)
