"""The account of batch work, kept by hand: a pass alone takes 1 s and earns 0.3 s, one with 31 more takes 2 s."""

from __future__ import annotations

import pytest

from moeflow.scheduler.latency_budget import LatencyBudget


def shared_budget(num_alone=0):
    """A budget that knows both kinds of pass, and has saved up for some alone."""
    budget = LatencyBudget()
    budget.note(0, 32, 2.0)
    for _ in range(num_alone):
        budget.note(1, 0, 1.0)
    return budget


@pytest.mark.parametrize(("num_alone", "room"), [(0, 0), (1, 0), (2, 0), (3, 31), (4, 31)])
def test_three_passes_pay_for_one_with_batch_tokens(num_alone, room):
    """It costs 1 s; a pass earns 0.3 s, and the one in question earns as much itself."""
    assert shared_budget(num_alone).room(1, 31) == room


def joins_until_it_is_spent(budget):
    count = 0
    while budget.room(1, 31):
        budget.note(1, 31, 2.0)
        count += 1
        assert count < 100
    return count


@pytest.mark.parametrize(("num_alone", "joins"), [(3, 1), (8, 3), (13, 5), (200, 5)])
def test_what_is_saved_is_spent_and_bounded(num_alone, joins):
    """Each pass with batch tokens takes 0.7 s of the savings, and those are never more than 4 s."""
    assert joins_until_it_is_spent(shared_budget(num_alone)) == joins


def test_a_pass_that_took_very_long_is_not_owed_for_ever():
    budget = shared_budget(5)
    budget.note(1, 31, 100.0)  # the account falls to -4 s; such a pass is now expected to take 2.8 s
    waited = 0
    while not budget.room(1, 31):
        budget.note(1, 0, 1.0)
        waited += 1
    assert waited == 19  # 4 + 1.8 s at 0.3 s each, the last of them its own


def test_no_pass_is_longer_than_five_alone():
    budget = LatencyBudget()
    budget.note(0, 512, 17.0)
    for _ in range(20):
        budget.note(1, 0, 1.0)
    # From 1 s for 1 token to 17 s for 512: 5 s are reached at 128.75 tokens.
    assert budget.room(1, 400) == 127
    assert budget.room(1, 127) == 127
    assert budget.room(1, 90) == 90


def test_a_pass_without_interactive_tokens_ends_what_was_saved():
    budget = shared_budget(4)
    budget.note(0, 32, 2.0)
    assert budget.room(1, 31) == 0
    assert budget.room(0, 77) == 77


def test_nothing_is_known_of_a_size_that_was_never_alone():
    budget = shared_budget(10)
    assert budget.room(9, 23) == 0
    budget.note(9, 23, 2.0)  # its time counts as its own: 0.6 s earned
    assert budget.room(9, 23) == 0
    assert budget.room(1, 31) == 31


def test_a_pass_alone_is_never_slower_than_the_same_with_others():
    """Measured alone at 1 s long ago, such passes now take 0.5 s with others: that costs nothing and earns 0.15 s."""
    budget = shared_budget(1)
    for _ in range(2):
        budget.note(1, 31, 0.5)
    # With others it is expected to take 2 s, less a fifth of the difference to 0.5 s each time: 1.46 s.
    # The account has 0.3 + 2 * 0.15 s and the pass itself earns 0.3 s, more than the 0.46 s it costs.
    assert budget.room(1, 31) == 31
    assert shared_budget(1).room(1, 31) == 0
