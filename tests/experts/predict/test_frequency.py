"""Experts that the frequency predictor names, by counts that were worked out by hand."""

from __future__ import annotations

from moeflow.experts.predict.frequency import FrequencyPredictor
from moeflow.experts.predict.predictor import RoutedModel


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
