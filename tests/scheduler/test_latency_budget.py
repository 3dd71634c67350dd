"""The budget over made-up machines: the mean stays within the limit, and batch tokens get the rest."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moeflow.scheduler.latency_budget import PAUSE, SLOWDOWN, LatencyBudget


def concave(num_tokens: int) -> float:
    """Like a mixture of experts: every row wakes more of them, until all are read."""
    return 0.01 + 0.03 * (1 - 0.75**num_tokens) + 0.0007 * num_tokens


def flat(num_tokens: int) -> float:
    return 0.02 + 1e-5 * num_tokens


def steep(num_tokens: int) -> float:
    return 0.001 + 0.01 * num_tokens


def run(budget: LatencyBudget, seconds, num_interactive: int, num_wanted: int) -> int:
    """One pass as the scheduler runs it; returns the batch tokens in it."""
    num_batch = budget.room(num_interactive, num_wanted)
    budget.note(num_interactive, num_batch, seconds(num_interactive + num_batch))
    return num_batch


@pytest.mark.parametrize("seconds", [concave, flat, steep])
@settings(max_examples=100)
@given(num_interactive=st.integers(1, 8), num_wanted=st.integers(1, 64), num_before=st.integers(0, 20))
@example(num_interactive=4, num_wanted=6, num_before=1)  # a pass of the job alone, about as large
@example(num_interactive=2, num_wanted=1, num_before=0)  # with and without the job, about as large
def test_time_per_token_stays_within_the_bound(seconds, num_interactive, num_wanted, num_before):
    budget = LatencyBudget()
    for _ in range(num_before):
        assert run(budget, seconds, 0, num_wanted) == num_wanted
    alone_s = seconds(num_interactive)
    spent_s = 0.0
    for number in range(1, 200):
        num_batch = run(budget, seconds, num_interactive, num_wanted)
        pass_s = seconds(num_interactive + num_batch)
        spent_s += pass_s
        assert pass_s <= alone_s * PAUSE * 1.3  # between measured sizes it is a draft
        assert spent_s <= alone_s * (SLOWDOWN * number + PAUSE)
    assert spent_s <= alone_s * 200 * 1.4


def test_batch_tokens_come_in_full_passes_where_those_pay():
    budget = LatencyBudget()
    for _ in range(50):
        run(budget, concave, 0, 32)
    got = [run(budget, concave, 1, 31) for _ in range(400)]
    assert set(got[50:]) == {0, 31}
    seconds = sum(concave(1 + n) for n in got)
    one_at_a_time = (SLOWDOWN * concave(1) - concave(1)) / (concave(2) - concave(1)) / (SLOWDOWN * concave(1))
    assert sum(got) / seconds > 4 * one_at_a_time  # tokens a second, against some in every pass


def test_where_more_rows_cost_nothing_they_always_take_part():
    budget = LatencyBudget()
    for _ in range(50):
        run(budget, flat, 0, 32)
    got = [run(budget, flat, 1, 31) for _ in range(100)]
    assert got[5:] == [31] * 95


def test_a_disturbed_pass_neither_starves_nor_floods():
    budget = LatencyBudget()
    for _ in range(50):
        run(budget, concave, 0, 32)
    for _ in range(50):
        run(budget, concave, 1, 31)
    budget.note(1, 31, 60.0)
    later = [run(budget, concave, 1, 31) for _ in range(100)]
    assert 3 <= sum(n > 0 for n in later) <= 20


def test_a_first_pass_that_was_disturbed_is_bounded_by_larger_ones():
    """The very first pass touches its memory for the first time: its time must not pass for the rule."""
    budget = LatencyBudget()
    budget.note(47, 0, 0.64)
    run(budget, concave, 0, 512)
    run(budget, concave, 0, 100)
    assert budget.room(47, 400) == 0
    assert budget.room(47, 15) == 15  # the tokens it pays for by itself


def test_tokens_join_a_pass_that_pays_for_them_without_savings():
    budget = LatencyBudget()
    for num_tokens in (33, 70, 101, 512):
        run(budget, concave, 0, num_tokens)
    run(budget, concave, 70, 0)
    budget.note(1, 0, concave(1))
    budget.note(0, 32, concave(32))  # forgets the savings
    assert budget.room(70, 15) == 15
    assert budget.room(70, 400) == budget.room(1, 31) == 0


def test_the_engine_is_shared_from_the_first_interactive_pass_on():
    budget = LatencyBudget()
    run(budget, concave, 0, 32)
    assert not budget.is_shared
    run(budget, concave, 1, 32)
    assert budget.is_shared


def test_nobody_interactive_nothing_held_back():
    assert LatencyBudget().room(0, 500) == 500


def test_a_size_never_seen_is_tried_alone_first():
    budget = LatencyBudget()
    run(budget, flat, 0, 32)
    assert budget.room(1, 31) == 0
