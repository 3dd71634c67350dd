"""The number of micro-batches in flight settles where passes are shortest, whatever the machine is like."""

from __future__ import annotations

from collections import Counter

import pytest

from moeflow.engine.in_flight_choice import MAX_IN_FLIGHT, InFlightChoice

TOKENS = 40


def passes(choice, seconds_of, number, *, most=MAX_IN_FLIGHT, tokens=TOKENS):
    """Run so many passes; return how many there were with each number of micro-batches."""
    found = Counter()
    for _ in range(number):
        cut = choice.choose(tokens, tokens, most)
        busy, waiting = seconds_of(cut)
        choice.note(tokens, tokens, cut, busy + waiting)
        found[cut] += 1
    return found


def waiting_is_filled(cut):
    return 1.0 + 0.05 * cut, 0.8 / cut


def weights_are_all(cut):
    return 1.0 * cut, 0.2 / cut


@pytest.mark.parametrize(("seconds_of", "best"), [(waiting_is_filled, 4), (weights_are_all, 1)])
def test_it_settles_where_passes_are_shortest(seconds_of, best):
    choice = InFlightChoice()
    passes(choice, seconds_of, 1500)
    after = passes(choice, seconds_of, 1000)
    assert after[best] > 900
    assert all(trial.verdict == (place < best.bit_length() - 1) for place, trial in enumerate(choice.trials))


def test_more_that_only_read_weights_again_are_tried_rarely():
    choice = InFlightChoice()
    found = passes(choice, weights_are_all, 20000)
    assert set(found) == {1, 2}
    assert found[2] < 20


def test_it_follows_a_change():
    choice = InFlightChoice()
    passes(choice, waiting_is_filled, 1500)
    passes(choice, weights_are_all, 3000)
    assert passes(choice, weights_are_all, 1000)[1] > 900


def test_a_pass_with_fewer_pieces_takes_the_largest_tried_number():
    choice = InFlightChoice()
    passes(choice, waiting_is_filled, 1500)
    found = passes(choice, waiting_is_filled, 50, most=3)
    assert found[2] >= 40
    assert set(found) <= {1, 2}  # 3 was never tried
    assert set(passes(choice, waiting_is_filled, 50, most=1)) == {1}


def test_sizes_are_learned_by_themselves():
    choice = InFlightChoice()
    passes(choice, waiting_is_filled, 1500)
    assert choice.choose(4 * TOKENS, 4 * TOKENS, 8) == 1
