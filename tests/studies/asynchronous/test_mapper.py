"""Mappers send every pair to a home of its expert, the balancing one so that no other choice would be more even."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.parallel.placement.placement import ExpertPlacement, ServingTable
from studies.asynchronous.mapper import LeastLoadedMapper, RoundRobinMapper, fill

HOMES = (((0, 1), (0,), (1, 2)), ((2,), (0, 1, 2), (1,)))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 7))
def test_filling_is_as_even_as_can_be(loads, number):
    shares = fill(np.array(loads), number)
    assert shares.sum() == number
    assert shares.min() >= 0
    ways = (way for way in itertools.product(range(number + 1), repeat=len(loads)) if sum(way) == number)
    best = min(max(map(sum, zip(loads, way, strict=True))) for way in ways)
    assert (np.array(loads) + shares).max() == best


def test_batches_and_replicas_take_turns():
    placement = ExpertPlacement(3, HOMES)
    mapper = RoundRobinMapper(placement)
    assert [mapper.home(batch, 5) for batch in range(5)] == [0, 1, 2, 0, 1]
    ids = np.array([[0, 1], [0, 2], [1, 2]])
    assert (mapper.owners(1, 2, ids) == ServingTable(HOMES[1]).ranks(ids)).all()


def test_batches_go_to_the_device_with_the_fewest_tokens():
    mapper = LeastLoadedMapper(ExpertPlacement(3, HOMES))
    assert [mapper.home(batch, tokens) for batch, tokens in enumerate([9, 2, 3, 4, 1])] == [0, 1, 2, 1, 2]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_pairs_go_to_homes_and_replicas_even_out_what_single_homes_leave(data):
    num_tokens = data.draw(st.integers(1, 9))
    ids = np.array(data.draw(st.lists(st.permutations(range(3)), min_size=num_tokens, max_size=num_tokens)))[:, :2]
    mapper = LeastLoadedMapper(ExpertPlacement(3, HOMES))
    loads = np.zeros(3, int)
    for _ in range(3):
        owners = mapper.owners(0, 0, ids)
        for expert, owner in zip(ids.ravel(), owners.ravel(), strict=True):
            assert owner in HOMES[0][expert]
        loads += np.bincount(owners.ravel(), minlength=3)
    counts = 3 * np.bincount(ids.ravel(), minlength=3)  # of experts 0 (devices 0, 1), 1 (device 0), 2 (devices 1, 2)
    best = min(
        max(counts[1] + first, counts[0] - first + second, counts[2] - second)
        for first in range(counts[0] + 1)
        for second in range(counts[2] + 1)
    )
    assert loads.sum() == ids.size * 3
    assert loads.max() <= max(2 * best, counts[1])  # greedy, expert after expert: never beyond twice the best
