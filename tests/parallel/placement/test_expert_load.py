"""Loads of experts and ranks, by sums worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from moeflow.core.errors import ConfigError
from moeflow.parallel.placement.expert_load import LoadTracker, imbalance, rank_loads
from moeflow.parallel.placement.placement import ExpertPlacement

FIRST = np.array([[[0, 1], [0, 2]], [[2, 1], [2, 1]]], np.uint8)  # [layers, tokens, K]


def add_pass(tracker, topk_ids):
    for layer, ids in enumerate(topk_ids):
        tracker.add_layer(layer, ids)
    tracker.end_pass()


def test_a_pass_is_counted_by_layer_and_expert():
    tracker = LoadTracker(2, 3, half_life=5)
    assert tracker.loads.tolist() == [[0, 0, 0], [0, 0, 0]]
    add_pass(tracker, FIRST)
    assert tracker.loads.tolist() == [[2, 1, 1], [0, 2, 2]]
    for _ in range(3):
        add_pass(tracker, FIRST)
    assert tracker.loads == pytest.approx(np.array([[2, 1, 1], [0, 2, 2]]))


def test_after_its_half_life_a_pass_counts_half_as_much():
    tracker = LoadTracker(1, 2, half_life=2)
    add_pass(tracker, np.zeros((1, 8, 1), int))
    for _ in range(2):
        add_pass(tracker, np.ones((1, 8, 1), int))
    weights = [0.5, 0.5**0.5, 1.0]
    assert tracker.loads[0] == pytest.approx([8 * 0.5 / sum(weights), 8 * (sum(weights) - 0.5) / sum(weights)])


@pytest.mark.parametrize("half_life", [0, -1, float("nan")])
def test_a_half_life_that_makes_no_sense_is_refused(half_life):
    with pytest.raises(ConfigError, match="above 0"):
        LoadTracker(1, 1, half_life)


def test_replicas_share_a_load_and_imbalance_is_the_largest_over_the_mean():
    placement = ExpertPlacement(2, (((0,), (0, 1), (1,)), ((0,), (0,), (0,))))
    loads = np.array([[3.0, 4.0, 1.0], [1.0, 1.0, 1.0]])
    assert rank_loads(placement, loads).tolist() == [[5, 3], [3, 0]]
    assert imbalance(placement, loads).tolist() == [1.25, 2.0]
    assert imbalance(placement, 0 * loads).tolist() == [1.0, 1.0]
