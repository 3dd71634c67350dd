"""What routers are expected to choose, against all that a few tokens can choose, and the figures of the literature."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from moeflow.core.errors import ConfigError
from moeflow.planner.costs.expected_routing import ExpectedRouting, expected_max
from studies.parallel.router_chances import reached_ranks, skewed_routing

NUM_EXPERTS, TOKENS = 5, 3
SERVED = np.array([[1, 1, 0.5, 0, 0], [0, 0, 0.5, 1, 1]])  # of two ranks; expert 2 has a replica


def outcomes(top_k: int, hot_share: float, num_hot: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return what one token may choose, and how likely."""
    chances = []
    for share, kind in ((hot_share, range(num_hot)), (1 - hot_share, range(num_hot, NUM_EXPERTS))):
        others = [expert for expert in range(NUM_EXPERTS) if expert not in kind]
        first = list(combinations(kind, min(top_k, len(kind))))
        besides = list(combinations(others, top_k - len(first[0])))
        chances += [(share / len(first) / len(besides), (*one, *other)) for one in first for other in besides]
    return chances


@pytest.mark.parametrize("skew", [(2, 0.4, 2), (2, 0.7, 1), (3, 0.3, 4), (3, 1.0, 5), (1, 0.5, 3)])
class TestAllChoices:
    def test_distinct_experts(self, skew):
        """Mean and variance, for the experts of a rank and for all experts."""
        routing = skewed_routing(NUM_EXPERTS, *skew)
        for held in ({0, 1}, {3, 4}, set(range(NUM_EXPERTS))):
            first = second = 0.0
            for tokens in product(outcomes(*skew), repeat=TOKENS):
                chance = float(np.prod([token[0] for token in tokens]))
                count = len(held & {expert for _, chosen in tokens for expert in chosen})
                first, second = first + chance * count, second + chance * count**2
            counted = np.array([TOKENS * (expert in held) for expert in range(NUM_EXPERTS)], float)
            assert routing.distinct(counted) == pytest.approx((first, second - first**2), abs=1e-9)

    def test_pairs_at_a_rank(self, skew):
        routing = skewed_routing(NUM_EXPERTS, *skew)
        counts = [(chance, len({0, 1} & set(chosen))) for chance, chosen in outcomes(*skew)]
        mean = sum(chance * count for chance, count in counts)
        variance = sum(chance * (count - mean) ** 2 for chance, count in counts)
        assert routing.pairs(np.array([1.0, 1, 0, 0, 0])) == pytest.approx((mean, variance), abs=1e-9)

    def test_ranks_that_a_token_reaches(self, skew):
        served = np.array([[1.0, 1, 0, 0, 0], [0, 0, 1, 1, 1]])
        reached = [
            sum(chance for chance, chosen in outcomes(*skew) if any(rank[expert] for expert in chosen))
            for rank in served
        ]
        assert reached_ranks(skewed_routing(NUM_EXPERTS, *skew), served) == pytest.approx(reached)

    def test_replicas_share_the_pairs(self, skew):
        routing = skewed_routing(NUM_EXPERTS, *skew)
        means = [routing.pairs(rank)[0] for rank in SERVED]
        assert means == pytest.approx(SERVED @ routing.chances)
        assert sum(means) == pytest.approx(skew[0])


def test_two_experts_of_which_one_has_fewer_tokens():
    """One gets both tokens, the other the first alone; a token takes either."""
    routing = skewed_routing(2, 1, 1.0, 2)
    mean, variance = routing.distinct(np.array([2.0, 1.0]))
    assert mean == pytest.approx(3 / 4 + 1 / 2)
    assert variance == pytest.approx(1 + 2 * 1 / 4 * 1 - mean**2 + 1 / 4)  # counts 1, 1, 1, 2 of four cases


@pytest.mark.parametrize(("num_ranks", "distinct"), [(2, 1.99), (4, 3.60), (8, 5.25), (64, 7.58)])
def test_a_token_of_eight_experts_reaches_as_many_ranks_as_the_literature_says(num_ranks, distinct):
    num_experts = 1 << 14
    served = np.kron(np.eye(num_ranks), np.ones(num_experts // num_ranks))
    reached = reached_ranks(skewed_routing(num_experts, 8, 1.0, num_experts), served).sum()
    assert reached == pytest.approx(distinct, abs=0.01)


@pytest.mark.parametrize(("num_ranks", "low", "high"), [(2, 1.27, 1.30), (4, 1.75, 1.83), (8, 2.5, 2.8)])
def test_one_token_makes_ranks_as_uneven_as_the_literature_says(num_ranks, low, high):
    """Expected maximum of active experts over their mean, at eight experts a token of 64 to 256."""
    served = np.repeat(np.eye(num_ranks)[0], 128 // num_ranks)
    mean, variance = skewed_routing(128, 8, 1.0, 128).pairs(served)
    widened = variance * num_ranks / (num_ranks - 1)
    most = expected_max(np.full(num_ranks, mean), np.full(num_ranks, widened), is_any=True)
    assert 0.98 * low < most / (8 / num_ranks) < 1.02 * high


def test_the_largest_of_certain_counts_is_the_largest():
    assert expected_max(np.array([2.0, 1.0, 0.0]), np.zeros(3), is_any=True) == pytest.approx(2, rel=1e-4)
    assert expected_max(np.array([2e6, 1e6]), np.zeros(2)) == pytest.approx(2e6, rel=1e-4)
    assert expected_max(np.zeros(3), np.zeros(3)) == 0


@pytest.mark.parametrize(("mean", "variance"), [(0.25, 0.2), (3.0, 3.0), (5.0, 9.0), (2000.0, 900.0)])
def test_the_largest_of_counts_is_that_of_many_draws(mean, variance):
    rng = np.random.default_rng(0)
    if variance < mean:
        trials = mean**2 / (mean - variance)
        draws = rng.binomial(round(trials), mean / round(trials), (100_000, 8))
    elif variance > mean:
        draws = rng.negative_binomial(mean**2 / (variance - mean), mean / variance, (100_000, 8))
    else:
        draws = rng.poisson(mean, (100_000, 8))
    expected = draws.max(axis=1)
    means, variances = np.full(8, mean), np.full(8, variance)
    assert expected_max(means, variances) == pytest.approx(expected.mean(), rel=0.02)
    assert expected_max(means, variances, is_any=True) == pytest.approx(expected[expected > 0].mean(), rel=0.02)


def test_a_binomial_of_one_trial_is_one_or_nothing():
    """As of one token whose expert is on one of 64 ranks."""
    share = 1 / 64
    assert expected_max(np.full(64, share), np.full(64, share * (1 - share)), is_any=True) == pytest.approx(1)


def test_measured_loads_are_chances_that_none_exceeds_one():
    routing = ExpectedRouting.of_loads(np.array([1.0, 2, 3, 2]), 2)
    assert routing.chances == pytest.approx([0.25, 0.5, 0.75, 0.5])
    hot = ExpectedRouting.of_loads(np.array([90.0, 1, 1, 2]), 2)
    assert hot.chances == pytest.approx([1, 0.25, 0.25, 0.5], abs=1e-6)
    assert ExpectedRouting.of_loads(np.zeros(4), 2).chances == pytest.approx([0.5] * 4)
    assert ExpectedRouting.of_loads(np.array([1.0, 0, 0]), 3).chances == pytest.approx([1, 1, 1])


def test_more_hot_experts_than_there_are_make_no_sense():
    with pytest.raises(ConfigError, match="9 of 8 experts cannot be hot: take 1 to 8"):
        skewed_routing(8, 2, 0.5, 9)
