from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.experts.predict.frequency import FrequencyPredictor
from moeflow.experts.predict.predictor import RoutedModel
from moeflow.experts.predict.previous_token import PreviousTokenPredictor

passes = st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=12)


@given(passes=passes, half_life=st.sampled_from([1, 3, 256]), min_rate=st.sampled_from([0.0, 0.3, 1.1]))
def test_frequency_ranks_by_decayed_counts_of_passes(passes, half_life, min_rate):
    predictor = FrequencyPredictor(RoutedModel(2, 5), half_life, min_rate)
    for ids in passes:
        predictor.observe(1, ids)
    weights = [0.5 ** (age / half_life) for age in reversed(range(len(passes)))]
    counts = [sum(w for w, ids in zip(weights, passes, strict=True) if expert in ids) for expert in range(5)]
    rates = [count / max(sum(weights), 1) for count in counts]
    ranked = predictor.predict(1)
    for expert in range(5):
        if abs(rates[expert] - min_rate) > 1e-9:
            assert (expert in ranked) == (rates[expert] > min_rate)
    assert [counts[expert] for expert in ranked] == pytest.approx(sorted((counts[e] for e in ranked), reverse=True))
    assert predictor.predict(0) == []


@given(passes=passes)
def test_previous_token_knows_the_last_pass_only(passes):
    predictor = PreviousTokenPredictor(RoutedModel(2, 5))
    assert predictor.predict(1) == []
    for ids in passes:
        predictor.observe(1, ids)
        ranked = predictor.predict(1)
        assert sorted(ranked) == sorted(set(ids))
        assert [ids.count(expert) for expert in ranked] == sorted(map(ids.count, set(ids)), reverse=True)
    assert predictor.predict(0) == []
