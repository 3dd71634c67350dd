"""A governor against predictors that pay, that do not, and that change."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from moeflow.predict.governor import WASTE_PRICE, Governor, Outcome

GOOD = Outcome(used_bytes=100, wasted_bytes=50)
BAD = Outcome(used_bytes=10, wasted_bytes=20, harmed_bytes=100)
MIDDLING = Outcome(used_bytes=110, harmed_bytes=100)
NOTHING = Outcome()


def run(governor, outcome, num_windows):
    """Play whole windows of equal passes; nothing happens while it is off. Return messages and windows that were on."""
    messages, num_on = [], 0
    for _ in range(num_windows):
        num_on += governor.is_on
        for _ in range(4):
            message = governor.end_pass(outcome if governor.is_on else NOTHING)
            if message:
                messages.append(message)
    return messages, num_on


def governor():
    return Governor("previous token", window_passes=4)


def test_what_pays_stays_on():
    assert run(governor(), GOOD, 50) == ([], 50)


def test_what_never_prefetches_is_left_alone():
    assert run(governor(), NOTHING, 50) == ([], 50)


def test_what_does_not_pay_is_switched_off_and_said():
    one = governor()
    messages, num_on = run(one, BAD, 4)
    assert (num_on, one.is_on) == (1, False)
    (message,) = messages
    assert message == (
        "prefetching by previous token is switched off, since it does not pay: 40 B of what it read were needed, "
        "80 B were not, and passes waited for 400 B on its account"
    )


@given(num_windows=st.integers(3, 3000))
def test_what_never_pays_is_tried_ever_more_rarely(num_windows):
    one = governor()
    messages, num_on = run(one, BAD, num_windows)
    assert len(messages) == 1
    assert num_on <= 1 + math.log2(num_windows) + num_windows / 256


def test_one_bad_window_is_forgiven():
    one = governor()
    for _ in range(10):
        assert run(one, GOOD, 1) == ([], 1)
        assert run(one, BAD, 1) == ([], 1)


def test_two_bad_windows_are_not():
    one = governor()
    run(one, GOOD, 1)
    messages, num_on = run(one, BAD, 4)
    assert (len(messages), num_on) == (1, 2)
    assert "80 B of what it read were needed" in messages[0]


def test_what_pays_later_comes_back_and_that_is_said():
    one = governor()
    run(one, BAD, 10)
    messages, _ = run(one, GOOD, 20)
    assert one.is_on
    assert len(messages) == 1
    assert "pays again" in messages[0]
    assert run(one, GOOD, 20) == ([], 20)


def test_a_trial_has_to_be_clearly_good():
    one = governor()
    assert run(one, MIDDLING, 20) == ([], 20)  # what is on stays on
    run(one, BAD, 2)
    messages, _ = run(one, MIDDLING, 100)
    assert messages == []
    assert not one.is_on


def test_a_trial_without_prefetches_goes_on():
    one = governor()
    run(one, BAD, 2)
    run(one, NOTHING, 50)
    assert one.is_on
    messages, _ = run(one, GOOD, 1)
    assert "pays again" in messages[0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=200))
def test_it_never_turns_off_while_every_window_pays(outcomes):
    one = governor()
    for used, wasted, harmed in outcomes:
        one.end_pass(Outcome(used + harmed + math.ceil(wasted * WASTE_PRICE), wasted, harmed))
        assert one.is_on
