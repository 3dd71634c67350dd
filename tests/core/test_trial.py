"""Trials on virtual clocks: their cost where X loses, their gain where X gains, and the time of their decisions."""

from __future__ import annotations

import itertools
import logging
import math
import random
import statistics
from collections.abc import Callable

import pytest

from moeflow.core.trial import (
    FIRST_REST,
    FIRST_STAND,
    LONGEST_REST,
    MIN_GAIN,
    MOST_WAITED,
    NOT_TRIED,
    SHARE,
    STAND,
    WINDOW,
    GainTrial,
    Trial,
)
from tests.marks import thorough_unless

LOSING = (0.86, 0.90, 0.91, 0.92, 0.93, 0.96, 0.98)  # recorded speeds with prediction, or drafts, over those without
FIRST_TRY = math.ceil(0.16 / SHARE)  # passes that save the risk of the first one with X


def passes(number: int, seed: int, noise: float) -> list[tuple[float, float]]:
    """Return the times of passes, and delays by other work; neighbours are alike, as texts and disks are."""
    chance, level, found = random.Random(seed), 0.0, []
    for _ in range(number):
        level = 0.5 * level + chance.gauss(0, noise * math.sqrt(0.75))
        found.append((math.exp(level), 4.0 if chance.random() < 0.005 else 0.0))
    return found


def speeds(
    ratio: float | Callable[[float], float], number: int, seed: int, noise: float, request: int
) -> tuple[float, float]:
    """Return the speed over that without X: of all passes, and of the request with the lowest.

    `ratio` is that of passes with X, or gives it for a share of the passes.
    """
    trial, times = Trial("x"), []
    for place, (seconds, delay_s) in enumerate(passes(number, seed, noise)):
        factor = ratio(place / number) if callable(ratio) else ratio
        took_s = (seconds / factor if trial.is_on else seconds) + delay_s
        times.append((seconds + delay_s, took_s))
        trial.end_pass(1, took_s)

    def speed(some: list[tuple[float, float]]) -> float:
        return sum(without for without, _ in some) / sum(took for _, took in some)

    return speed(times), min(speed(times[first : first + request]) for first in range(0, number, request))


@pytest.mark.parametrize("noise", [0.05, 0.15])
@pytest.mark.parametrize(("number", "request_passes"), [(24, 24), (384, 24), (384, 128), (3000, 3000)])
def test_no_recorded_case_ends_below_99_percent_of_doing_nothing(number, request_passes, noise):
    for ratio in LOSING:
        found = [speeds(ratio, number, seed, noise, request_passes) for seed in range(5 if number > 1000 else 20)]
        assert min(total for total, _ in found) >= 0.99
        assert statistics.fmean(total for total, _ in found) >= 1 - SHARE
        assert min(lowest for _, lowest in found) >= (0.99 if noise < 0.1 else 0.985)


# By noise: seeds of which some case is decided wrongly if few passes with X have to show the noise.
SEEDS = {0.1: (28, 139), 0.25: (0, 13, 44, 97, 131, 194), 0.4: (65, 90, 113, 158, 168, 196)}
CASES = {
    **{f"{ratio}": ratio for ratio in (0.86, 0.90, 0.93, 0.96, 0.98)},
    "falling": lambda share: 1.04 - 0.18 * share,
    "rising": lambda share: 0.86 + 0.18 * share,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("noise", "number"),
    thorough_unless(lambda noise, number: number == 0, itertools.product(SEEDS, (0, 40))),
)
def test_noise_and_drift_never_cost_more_than_a_percent(case, noise, number):
    """Of 1000 passes. Passes without X show the noise, and early checks find a gain that fades."""
    for seed in (*SEEDS[noise], *range(number)):
        assert speeds(CASES[case], 1000, seed, noise, 1000)[0] >= 0.99, seed


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "least"), [(0.1, (1.01, 1.055)), (0.25, (1.002, 1.02)), (0.4, (1.001, 1.005))])
def test_noise_hides_no_gain_in_the_mean(noise, least):
    for ratio, bound in zip((1.04, 1.1), least, strict=True):
        found = [speeds(ratio, 1000, seed, noise, 1000)[0] for seed in range(40)]
        assert statistics.fmean(found) >= bound
        assert min(found) >= 1.0


@pytest.mark.parametrize("speed", [0.92, 0.93])
def test_recorded_drafts_end_above_99_percent_of_doing_nothing(speed):
    """A kept token saves 0.8 of a pass, and each pass with drafts takes 0.27 longer. Too few are kept."""
    kept = (1 - 1 / speed + 0.27) / 0.8
    for number, least in ((31, 1.0), (100, 0.985), (400, 0.99), (3000, 0.99)):
        found = []
        for seed in range(60 if number < 1000 else 10):
            chance, trial, took = random.Random(seed), GainTrial("drafts"), 0.0
            for _ in range(number):
                gain = 0.8 * (chance.random() < kept) - 0.27 if trial.is_on else None
                took += 1 - (gain or 0.0)
                trial.note(gain)
            found.append(number / took)
        assert min(found) >= least
        assert statistics.fmean(found) >= 1 - 1.2 * SHARE


def test_recorded_gains_are_found():
    for noise, least in ((0.05, 1.025), (0.15, 1.02)):
        found = [speeds(1.04, 4000, seed, noise, 4000)[0] for seed in range(8)]
        assert statistics.fmean(found) >= least
        assert min(found) >= 1.0
        assert all(speeds(1.0, 1000, seed, noise, 1000)[0] == pytest.approx(1) for seed in range(3))


def test_large_gains_are_found_soon_and_checks_of_them_are_short():
    assert statistics.fmean(speeds(3.0, 100, seed, 0.15, 100)[0] for seed in range(10)) > 1.2
    assert all(speeds(3.0, 4000, seed, 0.15, 4000)[0] > 2.4 for seed in range(10))


def run(trial: Trial, factor: float, number: int, *, seconds: Callable[[int], float] = lambda _: 1.0) -> list[bool]:
    """Return which passes had X; these take `factor` times as long."""
    found = []
    for place in range(number):
        found.append(trial.is_on)
        trial.end_pass(1, seconds(place) * (factor if trial.is_on else 1.0))
    return found


def test_a_trial_starts_off_and_its_tries_are_saved_for():
    trial = Trial("x")
    found = run(trial, 1.2, FIRST_TRY + 1)
    assert found == [False] * FIRST_TRY + [True]
    assert trial.reason == "in trial: passes take 20% more time with it, 1 passes tried"
    assert trial.verdict is None
    assert not any(run(trial, 1.2, 20)), "the next try is saved for again"


def test_windows_alternate_once_there_is_no_risk():
    trial = Trial("x")
    found = []
    while trial.verdict is None:
        found += run(trial, 0.95, 1)
    found = found[-4 * WINDOW :]
    assert found.count(True) == 2 * WINDOW
    assert sum(before is not after for before, after in itertools.pairwise(found)) in (3, 4)


@pytest.mark.parametrize("factor", [0.5, 1.2])
def test_a_decision_and_its_reason_are_logged_once(factor, caplog):
    trial = Trial("prefetching by x")
    with caplog.at_level(logging.INFO):
        run(trial, factor, 5000)
    assert trial.verdict is (factor < 1)
    word, text = ("on", "50% less") if factor < 1 else ("off", "20% more")
    assert caplog.messages == [f"prefetching by x: switched {word}, passes take {text} time with it"]
    assert trial.reason.endswith(f"passes take {text} time with it")


def trials_of(found: list[bool], gap: int) -> list[int]:
    """Return the places where X is on for the first time after at least `gap` passes without."""
    return [place for place in range(gap, len(found)) if found[place] and not any(found[place - gap : place])]


def test_a_decision_against_x_stands_twice_as_long_each_time():
    found = run(Trial("x"), 1.25, 70_000)
    begun = trials_of(found, FIRST_REST // 2)
    rests = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert len(rests) >= 4
    for place, rest in enumerate(rests):
        expected = min(FIRST_REST * 2 ** (place + 1), LONGEST_REST)
        assert expected < rest < expected + 600  # and the trial itself
    assert sum(found) < 0.002 * len(found)


def test_a_decision_for_x_is_checked_rarely():
    trial = Trial("x")
    while not trial.verdict:
        run(trial, 0.5, 1)
    found = run(trial, 0.5, 20 * STAND)
    checks = [place for place in range(1, len(found)) if not found[place] and found[place - 1]]
    assert checks[0] == FIRST_STAND
    for number, (earlier, later) in enumerate(itertools.pairwise(checks), 1):
        stand = min(FIRST_STAND << number, STAND)
        assert stand <= later - earlier <= stand + 3 * WINDOW
    assert found.count(False) == WINDOW * len(checks)


def test_an_x_that_no_longer_gains_is_switched_off_and_one_that_begins_to_gain_is_found():
    trial = Trial("x")
    run(trial, 0.7, 1000)
    assert trial.verdict
    run(trial, 1.3, STAND + 50)
    assert trial.verdict is False
    run(trial, 0.7, FIRST_REST + 400)
    assert trial.verdict


def test_a_gain_too_small_for_the_work_is_declined():
    trial = Trial("x")
    run(trial, 1 - MIN_GAIN / 2, 10_000)
    assert not trial.verdict


def test_passes_are_compared_with_others_of_their_size():
    for factor in (0.8, 1.2):
        trial = Trial("x")
        for number in range(1500):
            size = (1, 2, 8)[number % 3]
            trial.end_pass(size, size**0.5 * (factor if trial.is_on else 1.0))
        assert trial.verdict is (factor < 1)


def test_a_pass_of_a_size_without_comparison_is_not_judged():
    trial = Trial("x")
    for number in range(FIRST_TRY):
        trial.end_pass(1 + number % 2 * 99, 1.0 + number % 2)
    assert trial.is_on
    trial.end_pass(7, 100.0)
    assert not trial.is_on
    assert trial.reason == NOT_TRIED
    while not trial.is_on:
        trial.end_pass(100, 2.0)
    trial.end_pass(90, 2.0 * 90 / 100)  # compared with passes of 100 tokens, a little fewer
    assert trial.reason.endswith("1 passes tried")


def test_a_part_of_another_x_starts_on():
    trial = Trial("x", starts_on=True)
    trial.end_pass(1, 0.5)
    assert run(trial, 0.5, 2 * WINDOW) == [False] * WINDOW + [True] * WINDOW
    run(trial, 0.5, 100)
    assert trial.verdict
    trial = Trial("x", starts_on=True)
    run(trial, 1.5, 100)
    assert trial.verdict is False


def test_x_is_not_tried_where_passes_wait_most_of_the_time():
    """There the device that X would use in advance is busy."""
    trial = Trial("x")
    for _ in range(5000):
        assert not trial.is_on
        trial.end_pass(1, 1.0, waited_s=MOST_WAITED + 0.05)
    assert trial.reason == f"passes wait for {MOST_WAITED + 0.05:.0%} of their time"
    for _ in range(FIRST_TRY + 20):
        trial.end_pass(1, 1.0, waited_s=0.2)
    assert trial.reason.startswith("in trial")


def test_x_is_switched_off_where_passes_begin_to_wait_most_of_the_time():
    trial = Trial("x")
    run(trial, 0.5, 1000)
    assert trial.verdict
    for _ in range(3 * STAND):
        trial.end_pass(1, 0.5 if trial.is_on else 1.0, waited_s=0.0 if trial.is_on else 0.9)
    assert (trial.is_on, trial.verdict) == (False, None)


def test_a_pass_of_no_time_is_no_error():
    trial = Trial("x")
    run(trial, 1.0, 3, seconds=lambda _: 0.0)
    assert not trial.is_on


def test_gains_are_followed_while_x_is_on():
    """Its gains are known without passes without X, so they need no checks; it ends once they are lost."""
    trial = GainTrial("x")
    for _ in range(2000):
        trial.note(0.5 if trial.is_on else None)
    assert trial.verdict
    lost = 0
    while trial.is_on:
        trial.note(-0.1)
        lost += 1
    assert 100 < lost < 200
    assert trial.verdict is False


def test_one_disturbed_pass_does_not_decide():
    trial = GainTrial("x")
    passes = 0
    gains = [-10.0]
    while trial.verdict is None and passes < 20_000:
        trial.note((gains.pop() if gains else 0.3) if trial.is_on else None)
        passes += 1
    assert trial.verdict is True
