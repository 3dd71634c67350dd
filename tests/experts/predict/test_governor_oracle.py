"""The governor beside a restatement of what it promises, with Python's statistics; verdicts at their limits."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from moeflow.experts.predict import governor as module
from moeflow.experts.predict.frequency import FrequencyPredictor
from moeflow.experts.predict.governor import Governor, _verdict
from moeflow.experts.predict.predictor import RoutedModel


class Restated:
    """Passes are set against a running mean of the logarithms of their size; trials alternate four and four."""

    def __init__(self):
        self.usual, self.without, self.with_it = {}, [], []
        self.is_on, self.verdict, self.rest, self.length = False, None, 0, 512

    def end_pass(self, size, seconds):
        before = self.usual.get(size)
        self.usual[size] = math.log(seconds) if before is None else 0.9 * before + 0.1 * math.log(seconds)
        if self.rest:
            self.rest -= 1
            if not self.rest:
                self.is_on = False
            return None
        if before is None:
            return None
        (self.with_it if self.is_on else self.without).append(math.log(seconds) - before)
        turn = (len(self.without) + len(self.with_it)) // 4 % 2
        self.is_on = bool(turn)
        return self.conclude()

    def conclude(self):
        one, other = self.without, self.with_it
        if min(len(one), len(other)) < 8:
            return None
        gain = statistics.fmean(one) - statistics.fmean(other)
        error = 3 * math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))
        if gain > error and gain > 0.05:
            found = True
        elif gain + error < 0.05 or min(len(one), len(other)) == 64:
            found = False
        else:
            return None
        is_new, self.verdict = found != self.verdict, found
        self.length = 512 if is_new else min(self.length * 2, 16384)
        self.rest, self.is_on, self.without, self.with_it = self.length, found, [], []
        share = abs(math.exp(-gain) - 1)
        text = f"switched {'on' if found else 'off'}: passes take {share:.0%} {'less' if gain >= 0 else 'more'} time"
        return f"prefetching by x is {text} with it" if is_new else None


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("factors", [(0.6,), (0.9, 1.3), (1.0, 0.9), (0.97,), (1.3, 0.6, 1.0)])
def test_the_governor_does_as_restated(factors, noise):
    chance = random.Random(repr((factors, noise)))
    governor, restated = Governor("x"), Restated()
    for number in range(2500):
        size = chance.choice([1, 1, 1, 4])
        factor = factors[number // 700 % len(factors)] if governor.is_on else 1.0
        seconds = 0.01 * size * factor * math.exp(chance.gauss(0, noise))
        assert governor.end_pass(size, seconds) == restated.end_pass(size, seconds)
        assert governor.is_on == restated.is_on


def test_rests_double_up_to_a_longest(monkeypatch):
    """Prefetching that is always worse: each trial confirms it, and the next one comes twice as late."""
    monkeypatch.setattr(module, "_LONGEST_REST", 1500)
    governor, begun = Governor("x"), []
    was_on = False
    for number in range(6000):
        governor.end_pass(1, 0.02 if governor.is_on else 0.01)
        if governor.is_on and not was_on:
            begun.append(number)
        was_on = governor.is_on
    trials = [later - earlier for earlier, later in itertools.pairwise(begun) if later - earlier > 100]
    for gap, rest in zip(trials, (512, 1024, 1500, 1500), strict=False):
        assert rest < gap < rest + 40  # and the trial itself
    assert len(trials) >= 4


def test_a_pass_of_no_time_is_no_error():
    governor = Governor("x")
    for _ in range(3):
        assert governor.end_pass(1, 0.0) is None


@pytest.mark.parametrize(
    ("without", "with_it", "verdict"),
    [
        ([0.5] * 8, [0.0] * 8, True),
        ([0.5] * 7, [0.0] * 9, None),  # too few of a kind
        ([0.5] * 9, [0.0] * 7, None),
        ([0.0625] * 8, [0.0] * 8, None),  # just the least gain: worth neither
        ([0.0624] * 8, [0.0] * 8, False),
        ([0.0626] * 8, [0.0] * 8, True),
        ([0.0] * 8, [0.5] * 8, False),
        ([0.0625] * 64, [0.0] * 64, False),  # long enough
        ([0.0625] * 63, [0.0] * 64, None),
        # Two values 2 apart: a variance of 8/7, so that the error is 3 * sqrt(2 / 7) = 1.6036.
        ([2.604, 0.604] * 4, [1.0, -1.0] * 4, True),
        ([2.603, 0.603] * 4, [1.0, -1.0] * 4, None),
        ([-0.542, -2.542] * 4, [1.0, -1.0] * 4, False),
        ([-0.540, -2.540] * 4, [1.0, -1.0] * 4, None),
    ],
)
def test_verdicts_at_their_limits(monkeypatch, without, with_it, verdict):
    monkeypatch.setattr(module, "_MIN_GAIN", 0.0625)
    assert _verdict(without, with_it) is verdict


def test_an_expert_of_just_the_least_rate_is_named():
    predictor = FrequencyPredictor(RoutedModel(2, 3), half_life=1, min_rate=0.5)
    predictor.observe(0, [2, 2, 1])
    predictor.observe(0, [1])
    # Decayed counts: expert 1 has 1.5 of 1.5 passes, expert 2 has 0.5; with 0.75 as half of them it is left out.
    assert predictor.predict(0) == [1]
    always = FrequencyPredictor(RoutedModel(1, 3), half_life=256, min_rate=1.0)
    for _ in range(5):
        always.observe(0, [2, 0])
    assert always.predict(0) == [0, 2]
    assert FrequencyPredictor(RoutedModel(1, 3), min_rate=0.0).predict(0) == []
