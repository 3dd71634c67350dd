"""A governor against predictors that make passes faster, slower, or neither, on a clock with noise."""

from __future__ import annotations

import random

import pytest

from moeflow.experts.predict.governor import ARM_PASSES, MIN_PASSES, TRUST, Governor

NAME = "previous token"
MAX_TRIAL = 2 * 64 + 2 * ARM_PASSES


class Play:
    """Passes that take 10 ms, times `factor` while the predictor prefetches, times `exp(noise)`."""

    def __init__(self, *, noise=0.2, seed=0):
        self.governor = Governor(NAME)
        self.chance = random.Random(seed)
        self.noise = noise

    def run(self, factor, num_passes, *, sizes=(1,)):
        """Return messages, and how many passes were made with prefetches."""
        messages, num_on = [], 0
        for number in range(num_passes):
            num_tokens = sizes[number % len(sizes)]
            seconds = 0.01 * num_tokens**0.5 * (factor if self.governor.is_on else 1.0)
            num_on += self.governor.is_on
            message = self.governor.end_pass(num_tokens, seconds * 2.718 ** self.chance.gauss(0, self.noise))
            if message:
                messages.append(message)
        return messages, num_on


@pytest.mark.parametrize("seed", range(20))
def test_what_makes_passes_faster_is_switched_on(seed):
    play = Play(seed=seed)
    (message,), _ = play.run(0.7, MAX_TRIAL)
    assert play.governor.is_on
    assert message.startswith("prefetching by previous token is switched on: passes take")
    assert message.endswith("% less time with it")


@pytest.mark.parametrize("factor", [1.1, 1.3, 2.0])
@pytest.mark.parametrize("seed", range(20))
def test_what_does_not_is_left_off(factor, seed):
    play = Play(seed=seed)
    messages, _ = play.run(factor, 400)
    assert not play.governor.is_on
    (message,) = messages
    assert "switched off" in message


def test_what_is_clearly_worse_costs_little():
    messages, num_on = Play(noise=0.05).run(1.5, 5000)
    assert len(messages) == 1
    assert num_on <= 4 * (MIN_PASSES + ARM_PASSES)  # a trial after 512 passes, then after 1024, 2048 and so on


@pytest.mark.parametrize("sizes", [(1, 2, 8), (3,)])
def test_passes_are_compared_with_others_of_their_size(sizes):
    better, worse = Play(noise=0.05), Play(noise=0.05)
    better.run(0.8, 200, sizes=sizes)
    worse.run(1.2, 200, sizes=sizes)
    assert (better.governor.is_on, worse.governor.is_on) == (True, False)


def test_a_trial_begins_without_and_alternates():
    play = Play(noise=0.0)
    seen = []
    for _ in range(1 + 2 * ARM_PASSES):  # the first pass of a size only says how long such a pass takes
        seen.append(play.governor.is_on)
        play.run(0.9, 1)
    assert seen == [False] * (1 + ARM_PASSES) + [True] * ARM_PASSES


def test_what_stops_to_pay_is_noticed_and_said():
    play = Play(noise=0.05)
    play.run(0.7, 200)
    assert play.governor.is_on
    messages, _ = play.run(1.3, 1000)
    assert not play.governor.is_on
    assert len(messages) == 1
    assert "more time" in messages[0]


def test_a_verdict_that_is_confirmed_stands_longer():
    play = Play(noise=0.01)
    _, first = play.run(1.5, 2000)
    _, later = play.run(1.5, 2000)
    assert later < first


def test_what_is_trusted_is_tried_more_often_and_judged_the_same():
    for factor, verdict in ((0.6, True), (1.0, False)):
        play = Play(noise=0.05)
        play.governor = Governor(NAME, is_trusted=True)
        arms = []
        while not (said := play.run(factor, 1))[0]:
            arms.append(said[1])
        assert (
            arms[: 1 + 2 * (TRUST + 1) * ARM_PASSES]
            == [
                1,  # the first of its size is not judged
                *([1] * TRUST * ARM_PASSES + [0] * ARM_PASSES) * 2,
            ][: len(arms)]
        )
        assert len(arms) >= (TRUST + 1) * ARM_PASSES
        assert play.governor.is_on == verdict
        play.run(factor, 511)
        assert play.governor.is_on == verdict
        play.run(factor, 1)
        assert play.governor.is_on  # the next trial
