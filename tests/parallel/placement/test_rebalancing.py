"""Steps between placements: each leaves a valid placement, and the last reaches the target."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.parallel.placement.rebalancing import ReplicaMove, apply_moves, moves

RANKS = 4
homes = st.sets(st.integers(0, RANKS - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
tables = st.tuples(*[st.tuples(*[homes] * 5)] * 2)
placements = tables.map(lambda table: ExpertPlacement(RANKS, table))


def num_held(placement, rank, layer) -> int:
    return len(placement.held_by(rank, layer))


@given(placements, placements, st.integers(1, 4))
def test_bounded_steps_converge_and_every_expert_stays_reachable(old, new, max_moves):
    now, num_steps = old, 0
    while steps := moves(now, new, max_moves):
        assert len(steps) <= max_moves
        for step in steps:
            before, now = now, apply_moves(now, [step])  # raises if an expert has no home
            assert now != before
            assert step.from_rank is None or step.from_rank in before.homes[step.layer][step.expert]
            for rank in range(RANKS):
                most = max(num_held(old, rank, step.layer), num_held(new, rank, step.layer) + 1)
                assert num_held(now, rank, step.layer) <= most
        num_steps += len(steps)
    assert now == new
    assert num_steps == sum(
        max(len(set(has) - set(had)), len(set(had) - set(has)))
        for layers in zip(old.homes, new.homes, strict=True)
        for had, has in zip(*layers, strict=True)
    )


def test_experts_that_change_places_go_over_a_staging_slot():
    old = ExpertPlacement(2, (((0,), (1,)),))
    new = ExpertPlacement(2, (((1,), (0,)),))
    assert moves(old, new, 9) == [ReplicaMove(0, 0, 0, 1), ReplicaMove(0, 1, 1, 0)]
    assert moves(old, new, 1) == [ReplicaMove(0, 0, 0, 1)]
    assert moves(old, old, 9) == []


def test_replicas_are_dropped_first_and_added_into_what_is_free_then():
    old = ExpertPlacement(2, (((0,), (0, 1), (1,)),))
    new = ExpertPlacement(2, (((0, 1), (0,), (1,)),))
    assert moves(old, new, 9) == [ReplicaMove(0, 1, 1, None), ReplicaMove(0, 0, None, 1)]


def test_a_step_waits_for_the_one_that_makes_room():
    old = ExpertPlacement(3, (((0,), (1,)),))
    new = ExpertPlacement(3, (((1,), (2,)),))
    assert moves(old, new, 9) == [ReplicaMove(0, 1, 1, 2), ReplicaMove(0, 0, 0, 1)]


def test_a_slot_that_was_filled_is_free_no_longer():
    old = ExpertPlacement(3, (((0,), (0,), (1,)),))
    new = ExpertPlacement(3, (((1,), (1,), (2,)),))
    assert moves(old, new, 9) == [ReplicaMove(0, 0, 0, 1), ReplicaMove(0, 2, 1, 2), ReplicaMove(0, 1, 0, 1)]


def test_what_has_become_free_is_used_before_a_staging_slot():
    """Experts 0 and 1 change places; 3 replaces 2."""
    old = ExpertPlacement(4, (((0,), (3,), (1,), (0,)),))
    new = ExpertPlacement(4, (((3,), (0,), (2,), (1,)),))
    assert moves(old, new, 9) == [
        ReplicaMove(0, 2, 1, 2),
        ReplicaMove(0, 3, 0, 1),
        ReplicaMove(0, 0, 0, 3),
        ReplicaMove(0, 1, 3, 0),
    ]
