"""A layer on ranks that wait for each other."""

from __future__ import annotations

import numpy as np
import pytest

from moeflow.parallel.placement.layouts import LAYOUTS
from studies.parallel.layer_cost import LayerCost
from studies.parallel.parallel_run import ParallelRun, run_layouts
from studies.parallel.skew_router import SkewRouter
from tests.studies.parallel.test_layer_cost import ALL_ON_TWO, layer


def skewed(skew, num_tokens=400) -> np.ndarray:
    """Routing whose hot experts are the two of rank 0 of four."""
    return SkewRouter(num_experts=8, top_k=1, router_skew=skew, num_experts_skew=2, seed=1).route(num_tokens)


def test_every_section_lasts_as_long_as_its_slowest_rank():
    cost = LayerCost(
        sections={"dispatch": np.array([1.0, 3.0]), "experts": np.array([5.0, 1.0])},
        num_flops=np.array([30.0, 10.0]),
        sent_bytes=np.zeros(2),
        weight_bytes=np.zeros(2),
        num_dropped=3,
    )
    run = ParallelRun("expert", cost, num_choices=12)
    assert run.seconds == 8
    assert run.idle_s.tolist() == [2, 4]
    assert run.work_imbalance == 1.5
    assert run.dropped_share == 0.25


@pytest.mark.parametrize("skew", [0.0, 0.25, 0.9])
def test_a_rank_works_or_waits(skew):
    runs, _ = run_layouts(layer(skewed(skew)), tuple(LAYOUTS))
    assert list(runs) == list(LAYOUTS)
    for name, run in runs.items():
        works = np.sum(list(run.cost.sections.values()), axis=0)
        assert works + run.idle_s == pytest.approx(np.full(4, run.seconds)), name
        assert run.idle_s.min() >= 0


def test_the_baseline_is_there_even_if_it_is_not_asked_for():
    runs, baseline = run_layouts(layer(ALL_ON_TWO), ("sliced",))
    assert list(runs) == ["sliced"]
    assert (baseline.layout, baseline.dropped_share) == ("capacity", 0.5)


def test_more_skew_never_helps_whole_experts_and_never_harms_slices():
    """From an even share on: then more skew only moves tokens to rank 0."""
    skews = np.linspace(0.25, 1, 16)
    at = [run_layouts(layer(skewed(skew, 20_000)), tuple(LAYOUTS))[0] for skew in skews]
    seconds = [runs["expert"].seconds for runs in at]
    idle = [runs["expert"].idle_s.mean() for runs in at]
    assert seconds == sorted(seconds)
    assert idle == sorted(idle)
    assert seconds[-1] > 2 * seconds[0]
    assert at[-1]["sliced"].seconds <= at[0]["sliced"].seconds
    assert at[-1]["sliced"].idle_s == pytest.approx(np.zeros(4))
