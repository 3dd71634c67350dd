from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.predict.frequency import FrequencyPredictor
from moeflow.predict.previous_token import PreviousTokenPredictor

passes = st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=12)


@given(passes=passes, half_life=st.sampled_from([1, 3, 256]))
def test_frequency_ranks_by_decayed_counts(passes, half_life):
    predictor = FrequencyPredictor(2, 5, half_life)
    for ids in passes:
        predictor.observe(1, ids)
    counts = {
        expert: sum(ids.count(expert) * 0.5 ** (age / half_life) for age, ids in enumerate(reversed(passes)))
        for expert in range(5)
    }
    ranked = predictor.predict(1)
    assert sorted(ranked) == [expert for expert in range(5) if counts[expert] > 0]
    assert [counts[expert] for expert in ranked] == pytest.approx(sorted(filter(None, counts.values()), reverse=True))
    assert predictor.predict(0) == []


@given(passes=passes)
def test_previous_token_knows_the_last_pass_only(passes):
    predictor = PreviousTokenPredictor(2)
    assert predictor.predict(1) == []
    for ids in passes:
        predictor.observe(1, ids)
        ranked = predictor.predict(1)
        assert sorted(ranked) == sorted(set(ids))
        assert [ids.count(expert) for expert in ranked] == sorted(map(ids.count, set(ids)), reverse=True)
    assert predictor.predict(0) == []
