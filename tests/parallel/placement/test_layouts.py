"""Layouts of whole experts by name: their first and later placements, the slots for them, and invalid layouts."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.extensions import ExtensibleTable
from moeflow.core.parallel_config import ParallelConfig
from moeflow.parallel.placement import layouts
from moeflow.parallel.placement.eplb import place_by_load
from moeflow.parallel.placement.expert_balancer import CHECK_PASSES, ExpertBalancer
from moeflow.parallel.placement.layouts import place_experts
from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.parallel.placement.whole_experts import WholeExperts

LOADS = np.array([[8.0, 1, 1, 1, 1, 4], [1.0, 1, 1, 1, 1, 1]])


def hottest_first(loads, num_ranks):
    """The most used expert is on the last rank, alone there; all others are on the first."""
    layers = []
    for layer in loads:
        homes = [(0,)] * len(layer)
        homes[int(layer.argmax())] = (num_ranks - 1,)
        layers.append(tuple(homes))
    return ExpertPlacement(num_ranks, tuple(layers))


def spread_if_known(loads, num_ranks):
    """All experts are on the first rank, and where one has no load at all, each is on every rank."""
    everywhere = tuple(range(num_ranks))
    layers = (((0,) if layer.all() else everywhere,) * len(layer) for layer in loads)
    return ExpertPlacement(num_ranks, tuple(layers))


@pytest.fixture
def add(monkeypatch):
    """Return a function that adds a layout as an installed package does."""

    def add(name, place):
        table = ExtensibleTable("moeflow.tests", {**layouts._OWN, name: place})
        monkeypatch.setattr(layouts, "LAYOUTS", table)

    return add


def test_moeflows_own_are_placements_by_index_and_by_load():
    assert place_experts("expert", LOADS, 2) == ExpertPlacement.by_index(2, 6, 2)
    assert place_experts("expert-by-load", LOADS, 2) == place_by_load(LOADS, 2, 4)
    assert max(place_by_load(LOADS, 2, 4).num_held_of(0)) == 4  # one more than half of 6


def test_another_packages_layout_is_asked_again_as_loads_become_known(add):
    add("hottest", hottest_first)
    experts = WholeExperts.of(ParallelConfig(num_ranks=3, expert_layout="hottest"), 3, 2, 6)
    assert experts.at_first.homes == (((2,), (0,), (0,), (0,), (0,), (0,)),) * 2  # all loads are alike
    assert experts.most_held == (5, 0, 1)
    balancer = ExpertBalancer(experts)
    hot = np.array([[5]] * 30 + [[0], [1], [2]])
    for _ in range(2 * CHECK_PASSES):
        balancer.serving_ranks(0, hot)
        balancer.serving_ranks(1, np.array([[1], [0], [0], [0]]))
        balancer.switch(balancer.end_pass())
    assert balancer.placement.homes[0] == ((0,), (0,), (0,), (0,), (0,), (2,))
    assert balancer.placement.homes[1] == experts.at_first.homes[1]  # nothing would be gained
    assert balancer.num_held == [10, 0, 2]


def test_a_placement_for_which_ranks_were_not_given_room_is_not_taken(add):
    add("spread", spread_if_known)
    experts = WholeExperts.of(ParallelConfig(num_ranks=2, expert_layout="spread"), 2, 1, 6)
    assert experts.most_held == (6, 0)
    balancer = ExpertBalancer(experts)
    for _ in range(2 * CHECK_PASSES):
        balancer.serving_ranks(0, np.array([[0], [1]]))
        assert balancer.end_pass() == []
    assert balancer.imbalance == 2.0  # which the placement that was wanted would have ended


@pytest.mark.parametrize("name", ["sliced", "replicated", "capacity", "nothing"])
def test_what_places_no_whole_experts_is_none(name):
    with pytest.raises(ConfigError, match=f"there is no layout '{name}' of whole experts here: install the package"):
        place_experts(name, LOADS, 2)


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ([[0, 1]], "the layout 'mine' returned a list and has to return an ExpertPlacement"),
        (ExpertPlacement.by_index(2, 6, 3), r"placed .* \[6, 6\] on 3 ranks, and was asked to place \[6, 6\] on 2"),
        (ExpertPlacement.by_index(1, 6, 2), r"placed .* \[6\] on 2 ranks, and was asked to place \[6, 6\] on 2"),
        (ExpertPlacement.by_index(2, 5, 2), r"placed .* \[5, 5\] on 2 ranks, and was asked to place \[6, 6\] on 2"),
    ],
)
def test_what_a_package_returns_has_to_be_a_placement_of_all_experts(add, found, complaint):
    add("mine", lambda loads, num_ranks: found)
    with pytest.raises(ConfigError, match=complaint):
        place_experts("mine", LOADS, 2)


def test_placements_have_digests_of_their_own():
    still = WholeExperts.staying(2, 2, 6)
    assert still.digest == WholeExperts.moving(2, 2, 6).digest
    assert len({still.digest, WholeExperts.staying(3, 2, 6).digest, WholeExperts.staying(2, 1, 6).digest}) == 3


def most_of_a_rank(placement, loads):
    """Return the largest load of a rank in each layer, counted pair by pair."""
    found = []
    for homes, layer in zip(placement.homes, loads, strict=True):
        of_ranks = dict.fromkeys(range(placement.num_ranks), 0.0)
        for ranks, load in zip(homes, layer, strict=True):
            for rank in ranks:
                of_ranks[rank] += load / len(ranks)
        found.append(max(of_ranks.values()))
    return found


@pytest.mark.parametrize("num_redundant", [0, 2])
def test_recorded_loads_decide_the_first_placement(num_redundant):
    """Without replicas it is the best of all halves, by brute force."""
    parallel = ParallelConfig(num_ranks=2, num_redundant_experts=num_redundant)
    experts = WholeExperts.of(parallel, 2, 2, 6, LOADS)
    found = most_of_a_rank(experts.at_first, LOADS)
    best = [
        min(max(sum(layer[list(half)]), layer.sum() - sum(layer[list(half)])) for half in combinations(range(6), 3))
        for layer in LOADS
    ]
    assert found == (best if num_redundant == 0 else [8.0, 3.0])
    assert most_of_a_rank(WholeExperts.of(parallel, 2, 2, 6).at_first, LOADS) == [10.0, 3.0]  # by index
    assert all(experts.fits(experts.at_first, layer) for layer in range(2))
    stays = ParallelConfig(num_ranks=2, moves_experts=False)
    assert WholeExperts.of(stays, 2, 2, 6, LOADS).at_first == ExpertPlacement.by_index(2, 6, 2)
