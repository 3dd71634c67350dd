"""Placements follow loads, by few steps a pass, and alike on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.parallel.placement.expert_balancer import CHECK_PASSES, MAX_MOVES, MIN_GAIN, ExpertBalancer
from moeflow.parallel.placement.expert_load import imbalance
from moeflow.parallel.placement.placement import ServingTable
from moeflow.parallel.placement.whole_experts import WholeExperts

HOT = np.array([[0], [1], [0], [1], [0], [1], [2], [3]])  # experts 0 and 1, which index puts on one of two ranks


def run_pass(balancer, layers):
    for layer, topk_ids in enumerate(layers):
        balancer.serving_ranks(layer, topk_ids)
    steps = balancer.end_pass()
    before = balancer.placement
    balancer.switch(steps)
    return steps, before


def test_hot_experts_of_one_rank_part():
    balancer = ExpertBalancer(WholeExperts.moving(2, 1, 4))
    for _ in range(2 * CHECK_PASSES):
        run_pass(balancer, [HOT])
    ranks = balancer.placement.homes[0]
    assert ranks[0] != ranks[1]
    assert balancer.imbalance == 1.0
    assert sum(balancer.rank_loads) == pytest.approx(len(HOT))
    assert balancer.num_moves > 0
    assert sorted(balancer.num_held) == [2, 2]


def test_a_hot_expert_gets_a_replica_where_there_is_room_for_one():
    balancer = ExpertBalancer(WholeExperts.moving(2, 1, 4, 2))
    only = np.zeros((8, 1), int)
    for _ in range(2 * CHECK_PASSES):
        run_pass(balancer, [only])
    assert balancer.placement.homes[0][0] == (0, 1)
    assert np.bincount(balancer.serving_ranks(0, only).ravel()).tolist() == [4, 4]


@pytest.mark.parametrize("experts", [WholeExperts.staying(2, 2, 4), WholeExperts.moving(2, 2, 4)])
def test_experts_stay_where_nothing_is_gained_or_nothing_may_move(experts):
    balancer = ExpertBalancer(experts)
    at_first = balancer.placement
    layers = [HOT, HOT] if experts.place is None else [np.arange(4)[:, None]] * 2
    for _ in range(2 * CHECK_PASSES):
        assert run_pass(balancer, layers)[0] == []
    assert balancer.placement == at_first
    assert balancer.imbalance == (1.5 if experts.place is None else 1.0)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_ranks_agree_and_no_layer_becomes_worse(data):
    num_layers, num_experts = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 8))
    num_ranks, num_redundant = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))
    popularity = np.random.default_rng(data.draw(st.integers(0, 99))).dirichlet(np.full(num_experts, 0.3), num_layers)
    rng = np.random.default_rng(0)
    experts = WholeExperts.moving(num_ranks, num_layers, num_experts, num_redundant)
    balancers = [ExpertBalancer(experts) for _ in range(2)]
    at_first = balancers[0].placement
    layers = [rng.choice(num_experts, (50, 1), p=shares) for shares in popularity]
    for _ in range(CHECK_PASSES + num_layers * (num_experts + num_redundant) * 2):
        (steps, before), (again, _) = [run_pass(balancer, layers) for balancer in balancers]
        assert steps == again
        assert len(steps) <= MAX_MOVES
        for step in steps:
            assert step.from_rank is None or step.from_rank in before.homes[step.layer][step.expert]
    after = balancers[0].placement
    for experts in after.homes:
        assert sum(map(len, experts)) <= num_experts + num_redundant
    loads = np.array([np.bincount(ids.ravel(), minlength=num_experts) for ids in layers], float)
    gains = imbalance(at_first, loads) - imbalance(after, loads)
    changed = [old != new for old, new in zip(at_first.homes, after.homes, strict=True)]
    assert all(gain >= MIN_GAIN if has_changed else gain == 0 for gain, has_changed in zip(gains, changed, strict=True))
    assert balancers[0].num_held == after.num_held()
    for layer, ids in enumerate(layers):
        assert (balancers[0].serving_ranks(layer, ids) == ServingTable(after.homes[layer]).ranks(ids)).all()
