"""Which layout of experts is chosen: against the best of the simulated ones, and in words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeflow.planner.costs.model_costs import ModelCosts
from studies.parallel.layer_cost import rank_link
from studies.parallel.layout_choice import choose_layout
from studies.parallel.layout_estimate import CHOICES, ExpectedLayer
from studies.parallel.parallel_run import run_layouts
from studies.parallel.router_chances import skewed_routing
from studies.parallel.skew_router import SkewRouter
from tests.planner.examples import HALF, SMALL, machine
from tests.studies.parallel.test_layer_cost import layer

FEW = SMALL.with_fields(num_experts=8)
MANY = SMALL.with_fields(num_experts=64, intermediate_size=128)
EXPERT_BYTES = 2 * 3 * 512 * 512
ALL_BYTES = 4 * 8 * EXPERT_BYTES  # of the small model's layers


def a_layer(num_tokens=64, num_ranks=4, *, room=10**10, link=1e9, skew=0.6, shape=FEW, top_k=2) -> ExpectedLayer:
    where = machine(ram=10**10, device=room)
    return ExpectedLayer(
        level=where.compute_level,
        link=rank_link(where, link),
        costs=ModelCosts(shape.with_fields(top_k=top_k), HALF),
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        routing=skewed_routing(shape.routing.num_experts, top_k, skew, max(shape.routing.num_experts // 10, 1)),
    )


def regret(at: ExpectedLayer, skew: float) -> float:
    """Return the simulated time of the chosen layout over the best layout's time."""
    shape = at.costs.shape
    router = SkewRouter(
        num_experts=shape.routing.num_experts,
        top_k=shape.routing.top_k,
        router_skew=skew,
        num_experts_skew=max(shape.routing.num_experts // 10, 1),
    )
    seconds = dict.fromkeys(CHOICES, 0.0)
    for seed in range(3):
        topk_ids = replace(router, seed=seed).route(at.num_tokens)
        given = layer(topk_ids, at.num_ranks, shape, at.routing.chances, level=at.level, link=at.link)
        for name, run in run_layouts(given, tuple(CHOICES))[0].items():
            seconds[name] += run.seconds
    best = choose_layout(at).best
    assert best is not None, "there is room for all"
    return seconds[best.layout] / min(seconds.values())


def test_what_is_chosen_takes_hardly_longer_than_the_best():
    grid = [
        regret(a_layer(num_tokens, num_ranks, link=link, skew=skew, shape=shape), skew)
        for num_tokens in (1, 16, 256, 2048)
        for num_ranks in (2, 16)
        for link in (1e8, 1e10)
        for skew in (0.1, 0.9)
        for shape in (FEW, MANY)
    ]
    assert np.mean(grid) < 1.05
    assert np.percentile(grid, 95) < 1.1


def test_a_slow_link_makes_ranks_compute_alone_and_a_full_one_share():
    """Where all experts fit, and where they do not."""
    alone = choose_layout(a_layer(512, link=1e6))
    assert alone.best is not None
    assert alone.best.layout == "replicated"
    assert alone.best.exchange_s == 0
    shared = choose_layout(a_layer(512, link=1e6, room=ALL_BYTES - 1))
    assert shared.best is not None
    assert shared.best.layout != "replicated"
    assert not shared.estimates["replicated"].fits
    assert shared.best.seconds == min(one.seconds for one in shared.estimates.values() if one.fits)


def test_a_token_alone_is_best_sliced_over_a_fast_link():
    """All ranks then read each expert of the token, a slice each."""
    choice = choose_layout(a_layer(1, link=1e12))
    assert choice.best is not None
    assert choice.best.layout == "sliced"
    assert "the slowest rank's experts take" in choice.reason
    figures = sorted(one.seconds for one in choice.estimates.values())
    assert choice.best.seconds == figures[0]
    assert f"{figures[0] * 1000:.3g} ms against {figures[1] * 1000:.3g} ms " in choice.reason


def test_a_long_prompt_over_a_slow_link_is_not_sent_to_everybody():
    choice = choose_layout(a_layer(4096, 8, link=1e9, skew=0.1, room=ALL_BYTES // 2, top_k=1))
    assert choice.best is not None
    assert choice.best.layout.startswith("expert")
    share = choice.estimates["sliced"].exchange_s / choice.estimates["sliced"].seconds
    assert share > 0.5


def test_room_for_one_layout_alone_is_the_reason():
    """Of 9 experts two ranks have 5 or 4, and slices of a half; no rank has memory for five."""
    shape = FEW.with_fields(num_experts=9)
    choice = choose_layout(a_layer(2048, 2, shape=shape, room=4 * 5 * EXPERT_BYTES - 1, link=1e6))
    assert choice.best is not None
    assert choice.best.layout == "sliced"
    assert choice.reason.endswith("a layer, and no other fits")


def test_what_fits_nowhere_says_need_and_have():
    choice = choose_layout(a_layer(room=ALL_BYTES // 4 - 1))
    assert choice.best is None
    assert choice.text.startswith("no layout fits: a rank needs 12.0 MiB at least and has 12.0 MiB; take more ranks")


def test_twice_the_ranks_halve_what_is_read():
    """With hardly anything to send and to route, each rank reads half of it."""
    choice = choose_layout(a_layer(1, link=1e15))
    assert "twice the ranks would be 1.9" in choice.text
    assert choice.doubled["sliced"].experts_s == pytest.approx(choice.estimates["sliced"].experts_s / 2)
