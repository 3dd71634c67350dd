"""The places of experts: the ones computed at lenders in a layer, and the memory each deserves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.running_fit import RunningFit
from moeflow.experts.remote.lender_costs import Candidate, ExpertSize, LenderCost, Split
from moeflow.experts.remote.worth import LendingMove, hot_enough, next_move

SIZE = ExpertSize(num_bytes=1 << 20, hidden=64, width=128)


def split_of(disk_s: float, round_trip_s: float, bytes_per_s: float) -> tuple[Split, LenderCost]:
    split = Split(SIZE)
    split.disk, split.resident = RunningFit([disk_s, 0.0], 32), RunningFit([1e-4, 0.0], 32)
    cost = LenderCost(SIZE, round_trip_s, bytes_per_s)
    cost.computing = RunningFit([1e-4, 1e-6], 32)
    return split, cost


def seconds(split, cost, away, home, here, num_tokens) -> float:
    """Return the time of a layer by hand."""
    here_s = split.resident.seconds(*here) + split.disk.seconds(len(home), sum(home))
    return max(here_s, cost.seconds(len(away), sum(away), min(sum(away), num_tokens)) if away else 0.0)


@given(
    pairs=st.lists(st.integers(1, 300), max_size=6),
    disk_s=st.floats(1e-5, 1e-1),
    round_trip_s=st.floats(1e-5, 1e-1),
    bytes_per_s=st.floats(1e4, 1e9),
    num_here=st.integers(0, 5),
)
def test_a_split_is_the_best_of_those_that_send_experts_of_few_rows_first_and_never_slower_than_the_disk(
    pairs, disk_s, round_trip_s, bytes_per_s, num_here
):
    split, cost = split_of(disk_s, round_trip_s, bytes_per_s)
    candidates = [Candidate(expert, 0, number) for expert, number in enumerate(pairs)]
    here = (num_here, 3 * num_here)
    chosen = split.choose(candidates, {0: cost}, here=here, on_disk=(0, 0), num_tokens=100)
    took = seconds(
        split, cost, [it.num_pairs for it in chosen], [it.num_pairs for it in candidates if it not in chosen], here, 100
    )
    ordered = sorted(pairs)
    splits = [seconds(split, cost, ordered[:cut], ordered[cut:], here, 100) for cut in range(len(pairs) + 1)]
    assert took == pytest.approx(min(splits))
    assert took <= splits[0] * (1 + 1e-9)


def test_a_slow_lender_is_tried_again_now_and_then():
    split, cost = split_of(disk_s=1e-4, round_trip_s=1.0, bytes_per_s=1e6)
    candidates = [Candidate(expert, 0, 2) for expert in range(3)]
    sent = [len(split.choose(candidates, {0: cost}, here=(1, 1), on_disk=(0, 0), num_tokens=3)) for _ in range(3 * 128)]
    assert set(sent) == {0, 1}
    assert sum(sent) == 3


def test_two_lenders_share_what_one_would_take_longer_for():
    split, cost = split_of(disk_s=1.0, round_trip_s=1e-4, bytes_per_s=1e9)
    candidates = [Candidate(expert, expert % 2, 1) for expert in range(4)]
    assert len(split.choose(candidates, {0: cost, 1: cost}, here=(0, 0), on_disk=(0, 0), num_tokens=2)) == 4


def of(*numbers: int, count: int = 6) -> np.ndarray:
    found = np.zeros(count, bool)
    found[list(numbers)] = True
    return found


def test_a_lender_gets_what_is_used_most_then_all_layers_in_turn_and_what_has_a_slot_last():
    counts = np.array([0.0, 0.0, 9.0, 0.0, 5.0, 7.0])  # two layers of three experts
    elsewhere, held, placed = of(), of(), []
    for _ in range(6):
        move = next_move(counts, of(2), elsewhere, held, num_slots=6, num_experts=3)
        assert move is not None
        assert move.drop is None
        placed.append(move.place)
        held[move.place] = True
    assert placed == [5, 4, 0, 3, 1, 2]
    assert next_move(counts, of(2), elsewhere, held, num_slots=6, num_experts=3) is None


def test_a_full_lender_changes_an_expert_only_for_one_that_is_used_much_more():
    counts = np.array([4.0, 8.0, 0.0, 0.0, 0.0, 0.0])
    arguments = (of(), of(0), of(0))
    assert next_move(counts, *arguments, num_slots=1, num_experts=3) is None
    hotter = counts + np.array([0, 2, 0, 0, 0, 0])
    assert next_move(hotter, *arguments, num_slots=1, num_experts=3) == LendingMove(1, 0)
    both = of(0, 1)  # the other is at another lender
    assert next_move(hotter, of(), both, of(0), num_slots=1, num_experts=3) is None


def test_an_expert_gets_a_slot_here_if_one_is_free_or_it_is_used_much_more_than_the_coldest():
    counts = np.array([4.0, 1.0, 3.0, 3.5, 0.0, 0.0])
    limit = hot_enough(counts, of(0, 1), has_free_slot=False)
    assert [count > limit for count in counts] == [True, False, False, True, False, False]
    assert hot_enough(counts, of(0, 1), has_free_slot=True) < 0


def test_moves_end():
    """With counts that stay, placing comes to rest whatever was there."""
    for seed, num_slots in itertools.product(range(5), (1, 3, 6)):
        chance = np.random.default_rng(seed)
        counts, held = chance.exponential(5, 6), of()
        for _ in range(30):
            move = next_move(counts, of(1), held, held, num_slots=num_slots, num_experts=3)
            if move is None:
                break
            held[move.place] = True
            if move.drop is not None:
                held[move.drop] = False
        assert move is None
