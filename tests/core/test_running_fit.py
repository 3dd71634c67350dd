"""Running estimates against the costs that made the observations."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.running_fit import RunningCurve, RunningFit


@given(
    costs=st.tuples(st.floats(0.001, 1), st.floats(0, 0.01), st.floats(0, 0.1)),
    seed=st.integers(0, 1000),
)
def test_the_time_of_each_part_is_found(costs, seed):
    rng, fit = random.Random(seed), RunningFit([0.0] * 3, 128)
    for _ in range(200):
        amounts = 1, rng.randrange(2, 200), rng.randrange(40)
        fit.observe(sum(amount * cost for amount, cost in zip(amounts, costs, strict=True)), *amounts)
    for amounts in ((1, 2, 0), (1, 100, 5), (1, 150, 40)):
        expected = sum(amount * cost for amount, cost in zip(amounts, costs, strict=True))
        assert fit.seconds(*amounts) == pytest.approx(expected, rel=0.02)


def test_no_part_takes_less_than_nothing_and_disturbed_passes_count_little():
    rng, fit = random.Random(0), RunningFit([0.0] * 3, 128)
    for _ in range(300):
        num_experts, num_absent = rng.randrange(50, 60), rng.randrange(3)
        fit.observe((1.0 - 0.005 * num_experts) * rng.uniform(0.9, 1.1), 1, num_experts, num_absent)
    assert fit.seconds(0, 1, 0) >= 0
    assert fit.seconds(0, 0, 1) >= 0
    usual_s = fit.seconds(1, 55, 1)
    fit.observe(500.0, 1, 55, 1)
    assert fit.seconds(1, 55, 1) < 1.2 * usual_s


def test_a_load_that_changes_is_followed():
    rng, fit = random.Random(0), RunningFit([0.0] * 3, 128)
    for read_s in (1.0, 0.1):
        for _ in range(800):
            num_experts, num_absent = rng.randrange(5, 60), rng.randrange(5)
            fit.observe(2.0 + 0.1 * num_experts + read_s * num_absent, 1, num_experts, num_absent)
    assert fit.seconds(0, 0, 1) == pytest.approx(0.1, rel=0.1)


def test_equal_passes_tell_what_they_take_together():
    fit = RunningFit([0.0] * 3, 128)
    for _ in range(16):
        fit.observe(0.5, 1, 60, 0)
    assert fit.seconds(1, 60, 0) == pytest.approx(0.5, rel=0.01)
    assert fit.seconds(0, 0, 1) == 0


def test_amounts_that_come_together_keep_their_assumed_ratio():
    """Decodes alone, then a prompt with 200 times the pairs: the assumption decides, and noise does not."""
    rng, fit = random.Random(0), RunningFit([1e-3, 1e-4], 32)
    for _ in range(300):
        num_experts = rng.randrange(1, 9)
        fit.observe(5e-3 * num_experts * rng.uniform(0.8, 1.2), num_experts, num_experts)
    assert fit.seconds(8, 8) == pytest.approx(0.04, rel=0.1)
    assert fit.seconds(8, 1600) == pytest.approx(8 * 4.5e-3 + 1600 * 4.5e-4, rel=0.5)


@given(first=st.floats(1e-5, 1e-1), second=st.floats(1e-5, 1e-1), seed=st.integers(0, 2**16))
def test_decodes_and_prompts_in_turns_tell_both_costs(first, second, seed):
    """Passes of few rows an expert, and of many."""
    fit, chance = RunningFit([1e-3, 1e-3], 32), random.Random(seed)
    for number in range(600):
        x = chance.randrange(1, 9)
        y = x * (chance.randrange(1, 3) if number % 2 else chance.randrange(50, 200))
        fit.observe(x * first + y * second, x, y)
    for x, y in ((8, 8), (3, 5), (8, 1000), (2, 300)):
        assert fit.seconds(x, y) == pytest.approx(x * first + y * second, rel=0.05)


def test_a_rate_is_the_seconds_over_the_units_of_late():
    fit = RunningFit([0.0], 32)
    assert fit.seconds(1) == 0
    for seconds in (1e-3, 5e-2):
        for _ in range(300):
            fit.observe(seconds, 1)
        assert fit.seconds(1) == pytest.approx(seconds, rel=0.05)
    fit.observe(0.0, 1)
    fit.observe(-1.0, 1)
    assert fit.seconds(2) == pytest.approx(0.1, rel=0.05)


def rising() -> RunningCurve:
    return RunningCurve(0.2, cell=int.bit_length, is_rising=True)


@given(passes=st.lists(st.tuples(st.integers(1, 600), st.floats(1e-3, 1.0)), min_size=1, max_size=30))
def test_in_a_rising_curve_more_tokens_never_take_less(passes):
    curve = rising()
    for num_tokens, seconds in passes:
        curve.note(num_tokens, seconds)
    expected = [curve.expect(num_tokens) for num_tokens in range(1, 700)]
    assert all(one <= other * (1 + 1e-9) for one, other in itertools.pairwise(expected))
    assert expected[0] >= min(seconds for _, seconds in passes) * (1 - 1e-9)


def test_sizes_between_observed_ones_lie_between_their_times():
    for curve in (rising(), RunningCurve(0.2)):
        curve.note(4, 0.1)
        curve.note(16, 0.4)
        assert curve.expect(1) == curve.expect(4) == pytest.approx(0.1)
        assert curve.expect(10) == pytest.approx(0.25)
        assert curve.expect(32) == pytest.approx(0.8)


def test_without_cells_each_size_has_its_own_mean():
    curve = RunningCurve(0.5)
    curve.note(4, 1.0)
    curve.note(5, 0.5)
    curve.note(5, 0.7)
    assert [curve.has_seen(size) for size in (4, 5, 6)] == [True, True, False]
    assert (curve.expect(4), curve.expect(5)) == (1.0, pytest.approx(0.6))


def test_cells_share_a_mean_of_sizes_and_seconds():
    curve = rising()
    curve.note(4, 1.0)
    curve.note(6, 2.0)  # a fifth of the way to each new pass: 4.4 tokens, 1.2 s
    curve.note(5, 100.0)  # disturbed: three times the expected counts, 4.52 tokens and 1.68 s
    assert [curve.has_seen(number) for number in (3, 4, 7, 8)] == [False, True, True, False]
    assert curve.expect(2) == curve.expect(4) == pytest.approx(1.68)
    assert curve.expect(9.04) == pytest.approx(3.36)
    curve.note(16, 3.0)
    assert curve.expect(10.26) == pytest.approx(2.34)  # half way between 4.52 and 16
    assert curve.expect(32) == pytest.approx(6.0)
    curve.note(64, 1.0)  # more tokens in less time: then fewer take no more, either
    assert [curve.expect(number) for number in (4, 16, 64, 128)] == pytest.approx([1.0, 1.0, 1.0, 2.0])
