"""Layouts by formula, against layouts of given tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from studies.parallel.layout_estimate import CHOICES, ExpectedLayer, estimate_layouts
from studies.parallel.parallel_run import run_layouts
from studies.parallel.router_chances import skewed_routing
from studies.parallel.skew_router import SkewRouter
from tests.planner.examples import SMALL
from tests.studies.parallel.test_layer_cost import layer


def expected(at, routing) -> ExpectedLayer:
    """Return a layer of given tokens as one whose routing alone is known."""
    return ExpectedLayer(
        level=at.level,
        link=at.link,
        costs=at.costs,
        num_ranks=at.num_ranks,
        num_tokens=len(at.topk_ids),
        routing=routing,
    )


def simulated(name, at) -> float:
    return run_layouts(at, (name,))[0][name].seconds


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_without_chance_formulas_say_what_is_counted(num_tokens, num_ranks):
    """Each token takes all eight experts; of a section's parts, the formula takes each one's slowest rank."""
    at = layer(np.tile(np.arange(8), (num_tokens, 1)), num_ranks)
    estimates = estimate_layouts(expected(at, skewed_routing(8, 8, 1.0, 8)))
    for name in set(CHOICES) - {"expert-by-load"}:  # whose replicas take turns, on average alike
        assert estimates[name].seconds == pytest.approx(simulated(name, at), rel=5e-3), name
        run = run_layouts(at, (name,))[0][name]
        assert estimates[name].experts_bytes == pytest.approx(run.cost.weight_bytes.max() * 4)


@pytest.mark.parametrize("num_experts", [8, 64])
@pytest.mark.parametrize("skew", [0.125, 0.7])
@pytest.mark.parametrize(("num_tokens", "num_ranks"), [(4, 2), (16, 8), (256, 4), (4000, 16)])
def test_formulas_are_close_to_the_mean_of_many_draws(num_experts, skew, num_tokens, num_ranks):
    shape = SMALL.with_fields(num_experts=num_experts)
    num_hot, seeds = num_experts // 8, range(400 // num_tokens + 2)
    router = SkewRouter(num_experts=num_experts, top_k=2, router_skew=skew, num_experts_skew=num_hot)
    routing = skewed_routing(num_experts, 2, skew, num_hot)
    layers = [
        layer(dataclasses.replace(router, seed=seed).route(num_tokens), num_ranks, shape, routing.chances)
        for seed in seeds
    ]
    estimates = estimate_layouts(expected(layers[0], routing))
    for name in CHOICES:
        mean = np.mean([simulated(name, at) for at in layers])
        near = 0.3 if name == "expert-by-load" else 0.15  # tokens alternate: few tokens are not spread at random
        assert estimates[name].seconds == pytest.approx(mean, rel=near), name
