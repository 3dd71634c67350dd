"""Made-up routing against the shares it is to have. Seeds are fixed: nothing here is left to luck."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.errors import ConfigError
from studies.parallel.skew_router import SkewRouter

CHI_SQUARE_999 = {5: 20.52, 35: 66.62, 57: 95.75}  # 99.9th percentile by degrees of freedom


def router(**changes) -> SkewRouter:
    fields = {"num_experts": 64, "top_k": 1, "router_skew": 0.6, "num_experts_skew": 6, "seed": 1}
    return SkewRouter(**{**fields, **changes})


def chi_square(counts) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 for count in counts) / expected


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_hot_experts_get_their_share_and_all_of_a_kind_the_same(top_k, seed):
    num_tokens = 30_000
    ids = router(top_k=top_k, seed=seed).route(num_tokens)
    counts = np.bincount(ids.ravel(), minlength=64)
    expected, spread = 0.6 * num_tokens, (0.6 * 0.4 * num_tokens) ** 0.5
    assert abs(counts[:6].sum() / top_k - expected) < 3.3 * spread
    assert chi_square(counts[:6]) < CHI_SQUARE_999[5]
    assert chi_square(counts[6:]) < CHI_SQUARE_999[57]


def test_pairs_of_experts_are_alike_likely():
    """36 unordered pairs of nine experts."""
    ids = np.sort(router(num_experts=9, top_k=2, router_skew=1.0, num_experts_skew=9).route(36_000), axis=1)
    pairs = np.bincount(ids[:, 0] * 9 + ids[:, 1], minlength=81).reshape(9, 9)
    counts = pairs[np.triu_indices(9, 1)]
    assert counts.sum() == 36_000
    assert chi_square(counts) < CHI_SQUARE_999[35]


@given(st.integers(1, 9), st.data())
def test_no_expert_twice_for_a_token(num_experts, data):
    top_k = data.draw(st.integers(1, num_experts))
    made = router(
        num_experts=num_experts,
        top_k=top_k,
        num_experts_skew=data.draw(st.integers(1, num_experts)),
        router_skew=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
    )
    ids = made.route(50)
    assert ids.shape == (50, top_k)
    assert ids.min() >= 0
    assert ids.max() < num_experts
    assert all(len(set(row)) == top_k for row in ids.tolist())


def test_a_token_of_more_experts_than_are_hot_takes_all_of_them():
    ids = router(num_experts=8, top_k=3, router_skew=1.0, num_experts_skew=2).route(100)
    assert all({0, 1} < set(row) for row in ids.tolist())


def test_the_same_router_routes_alike_and_another_seed_otherwise():
    assert (router().route(100) == router().route(100)).all()
    assert (router().route(100) != router(seed=2).route(100)).any()


def test_more_skew_only_takes_tokens_from_the_rest():
    before, after = router(top_k=2).route(1000), router(top_k=2, router_skew=0.8).route(1000)
    changed = (before != after).any(axis=1)
    assert 150 < changed.sum() < 250
    assert before[changed].min() >= 6 > after[changed].max()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"top_k": 65}, "65 experts a token"),
        ({"top_k": 0}, "0 experts a token"),
        ({"router_skew": 1.1}, "share of 1.1"),
        ({"router_skew": float("nan")}, "share of nan"),
        ({"num_experts_skew": 0}, "0 of 64 experts"),
        ({"num_experts_skew": 65}, "65 of 64 experts"),
    ],
)
def test_a_router_that_makes_no_sense_is_refused(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        router(**changes)
