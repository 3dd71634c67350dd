"""Placements against brute force on tiny cases, and what must hold for all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.errors import CapacityError, ConfigError
from moeflow.parallel.placement.eplb import place_by_load
from moeflow.parallel.placement.expert_load import rank_loads
from moeflow.parallel.placement.placement import ExpertPlacement, ServingTable

loads_of = st.lists(st.integers(0, 50), min_size=1, max_size=7)


def by_load(loads, num_ranks, slots) -> ExpertPlacement:
    return place_by_load(np.array([loads], float), num_ranks, slots)


def makespan(placement, loads) -> float:
    """The load of the fullest rank."""
    return float(rank_loads(placement, np.array([loads], float)).max())


def optimum(loads, num_ranks, slots, sets) -> float:
    """The smallest possible load of the fullest rank, if each expert's homes are one of `sets`: all are tried."""
    best = float(sum(loads))
    for homes in itertools.product(sets, repeat=len(loads)):
        if all(sum(rank in ranks for ranks in homes) <= slots for rank in range(num_ranks)):
            best = min(best, makespan(ExpertPlacement(num_ranks, (homes,)), loads))
    return best


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "blocks"),
    [
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (7, 3, [[0, 1], [2, 3], [4, 5, 6]]),
        (9, 4, [[0, 1], [2, 3], [4, 5], [6, 7, 8]]),
        (2, 4, [[], [0], [], [1]]),
        (5, 1, [[0, 1, 2, 3, 4]]),
    ],
)
def test_blocks_by_index(num_experts, num_ranks, blocks):
    placement = ExpertPlacement.by_index(3, num_experts, num_ranks)
    for layer in range(3):
        assert [placement.held_by(rank, layer) for rank in range(num_ranks)] == blocks


@given(st.integers(1, 4), st.integers(1, 4), loads_of)
def test_a_placement_by_load_has_every_expert_and_keeps_to_its_slots(num_ranks, slots, loads):
    loads = loads[: num_ranks * slots]
    placement = place_by_load(np.array([loads, loads[::-1]], float), num_ranks, slots)
    for layer in range(2):
        held = [placement.held_by(rank, layer) for rank in range(num_ranks)]
        assert max(map(len, held)) <= slots
        assert set().union(*held) == set(range(len(loads)))


@given(st.integers(2, 3), st.integers(1, 5), loads_of)
def test_a_placement_by_load_is_within_a_third_of_the_best_without_replicas(num_ranks, slots, loads):
    """Graham's bound on packing the heaviest first: 4/3 of the optimum."""
    loads = loads[: min(num_ranks * slots, 6)]
    best = optimum(loads, num_ranks, slots, [(rank,) for rank in range(num_ranks)])
    assert makespan(by_load(loads, num_ranks, slots), loads) <= best * 4 / 3 + 1e-9


@pytest.mark.parametrize(
    ("loads", "num_ranks", "slots", "least"),
    [
        ([30, 1], 2, 2, 15.5),  # both everywhere
        ([33, 9, 18], 3, 3, 20),
        ([90, 10, 10, 10], 3, 2, 40),  # the hot one everywhere, with one other each
        ([41, 43, 1], 2, 2, 43),  # a half of the heaviest with the next would be worse than no replica
    ],
)
def test_hot_experts_are_replicated_where_that_helps(loads, num_ranks, slots, least):
    sets = [ranks for n in range(1, num_ranks + 1) for ranks in itertools.combinations(range(num_ranks), n)]
    assert optimum(loads, num_ranks, slots, sets) == pytest.approx(least)
    assert makespan(by_load(loads, num_ranks, slots), loads) == pytest.approx(least)


def test_fewer_slots_than_experts_are_refused_with_a_remedy():
    with pytest.raises(CapacityError, match=r"9 experts .* 4 ranks of 2 have 8: take at least 3 slots a rank"):
        by_load([1] * 9, 4, 2)
    assert makespan(by_load([1] * 9, 4, 3), [1] * 9) == 2.5  # three of them twice


@pytest.mark.parametrize(
    ("homes", "complaint"),
    [
        ((((0,), ()),), "expert 1 of layer 0"),
        ((((2,),),), "one of 0 to 1"),
        ((((-1, 1),),), "one of 0 to 1"),
        ((((0, 0),),), "none twice"),
        ((((1, 0),),), "ascending"),
        ((((0,),), ((0,), (1,))), "different numbers"),
    ],
)
def test_what_is_no_placement_is_refused(homes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ExpertPlacement(2, homes)


def test_replicas_take_turns_by_the_index_of_the_token():
    placement = ExpertPlacement(4, (((0,), (1,), (2,)), ((0, 3), (1,), (0, 1, 2))))
    ids = np.array([[0, 1], [0, 2], [2, 1], [2, 0], [0, 2]])
    assert ServingTable(placement.homes[1]).ranks(ids).tolist() == [[0, 1], [3, 1], [2, 1], [0, 3], [0, 1]]
    assert ServingTable(placement.homes[0]).ranks(ids).tolist() == ids.tolist()
    assert ServingTable(placement.homes[0]).ranks(ids[:0]).shape == (0, 2)
