from __future__ import annotations

import pytest

from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", float("inf")),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", 2**63),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {3: 101.0}),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", (-1,)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_edges_are_accepted():
    params = SamplingParams(
        max_tokens=0, temperature=0, top_k=-1, top_p=1, min_p=0, seed=-(2**63), logprobs=0, presence_penalty=-2
    )
    assert params.is_greedy
    assert not SamplingParams().is_greedy
