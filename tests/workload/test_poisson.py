"""Made-up traffic against the distributions that the thesis names. Seeds are fixed: nothing here is left to luck."""

from __future__ import annotations

import itertools
import math

import pytest

from moeflow.core.errors import ConfigError
from moeflow.workload.poisson import WorkloadSpec, make_arrivals

CHI_SQUARE_999 = {9: 27.88, 15: 37.70}  # 99.9th percentile by degrees of freedom
KS_999 = 1.95  # 99.9th percentile of the Kolmogorov-Smirnov statistic


def spec(**changes) -> WorkloadSpec:
    return WorkloadSpec(**{"rate": 50.0, "num_requests": 2000, "vocab_size": 1000, "seed": 3, **changes})


def kolmogorov_smirnov(values, cdf) -> float:
    """The greatest distance between the values' distribution and `cdf`, times the square root of their number."""
    ordered = sorted(values)
    n = len(ordered)
    distance = max(max(i / n - cdf(v), cdf(v) - (i - 1) / n) for i, v in enumerate(ordered, 1))
    return distance * math.sqrt(n)


def chi_square(values, low, high, num_bins) -> float:
    """Against the uniform distribution over the whole numbers low..high, whose count the bins divide."""
    width = (high - low + 1) // num_bins
    assert width * num_bins == high - low + 1
    counts = [0] * num_bins
    for value in values:
        counts[(value - low) // width] += 1
    expected = len(values) / num_bins
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rate", [0.5, 50.0, 500.0])
def test_gaps_are_exponential(rate, seed):
    times = [0.0, *(a.at_s for a in make_arrivals(spec(rate=rate, seed=seed)))]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert min(gaps) > 0
    assert kolmogorov_smirnov(gaps, lambda t: 1 - math.exp(-rate * t)) < KS_999


def test_the_kth_arrival_is_erlang():
    rate, k = 10.0, 5
    times = [make_arrivals(spec(rate=rate, num_requests=k, seed=seed))[-1].at_s for seed in range(1000)]

    def erlang(t: float) -> float:
        return 1 - sum(math.exp(-rate * t) * (rate * t) ** n / math.factorial(n) for n in range(k))

    assert kolmogorov_smirnov(times, erlang) < KS_999


def test_arrivals_are_as_many_in_every_second():
    """Counts in equal intervals have the variance of a Poisson distribution: that of their mean."""
    times = [a.at_s for a in make_arrivals(spec(rate=20.0, num_requests=4000))]
    counts = [0] * int(times[-1])
    for at in times:
        if at < len(counts):
            counts[int(at)] += 1
    mean = sum(counts) / len(counts)
    variance = sum((c - mean) ** 2 for c in counts) / (len(counts) - 1)
    assert mean == pytest.approx(20, rel=0.1)
    assert variance / mean == pytest.approx(1, abs=0.3)


def test_lengths_are_uniform_and_reach_both_ends():
    arrivals = make_arrivals(spec(min_prompt=1, max_prompt=160, min_new=1, max_new=100))
    prompts, news = [len(a.prompt_token_ids) for a in arrivals], [a.num_new for a in arrivals]
    assert (min(prompts), max(prompts), min(news), max(news)) == (1, 160, 1, 100)
    assert chi_square(prompts, 1, 160, 16) < CHI_SQUARE_999[15]
    assert chi_square(news, 1, 100, 10) < CHI_SQUARE_999[9]


def test_prompt_and_answer_lengths_are_independent():
    arrivals = make_arrivals(spec())
    x, y = [len(a.prompt_token_ids) for a in arrivals], [a.num_new for a in arrivals]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    correlation = covariance / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))
    assert abs(correlation) < 0.06


def test_tokens_are_uniform_over_the_vocabulary():
    tokens = [t for a in make_arrivals(spec(num_requests=100)) for t in a.prompt_token_ids]
    assert 0 <= min(tokens) < max(tokens) < 1000
    assert chi_square(tokens, 0, 999, 10) < CHI_SQUARE_999[9]


def test_the_same_spec_makes_the_same_requests_and_another_seed_others():
    assert make_arrivals(spec(num_requests=20)) == make_arrivals(spec(num_requests=20))
    assert make_arrivals(spec(num_requests=20)) != make_arrivals(spec(num_requests=20, seed=4))


def test_another_rate_brings_the_same_lengths_at_another_pace_with_other_tokens():
    slow, fast = make_arrivals(spec(num_requests=50, rate=1.0)), make_arrivals(spec(num_requests=50, rate=100.0))
    assert [a.num_new for a in slow] == [a.num_new for a in fast]
    assert [len(a.prompt_token_ids) for a in slow] == [len(a.prompt_token_ids) for a in fast]
    assert [a.at_s for a in slow] == pytest.approx([a.at_s * 100 for a in fast])
    assert all(a.prompt_token_ids != b.prompt_token_ids for a, b in zip(slow, fast, strict=True))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rate": 0.0}, "0 requests a second"),
        ({"rate": math.inf}, "inf requests a second"),
        ({"num_requests": 0}, "number of requests is 0"),
        ({"min_prompt": 0}, "prompt length is to be from 0 to 128"),
        ({"min_new": 5, "max_new": 4}, "new tokens is to be from 5 to 4"),
        ({"vocab_size": 0}, "vocabulary of 0"),
    ],
)
def test_traffic_that_makes_no_sense_is_refused(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        spec(**changes)


def test_the_longest_request_bounds_all():
    some = spec(min_prompt=3, max_prompt=5, min_new=2, max_new=7)
    assert some.max_total == 12
    assert all(len(a.prompt_token_ids) + a.num_new <= 12 for a in make_arrivals(some))
