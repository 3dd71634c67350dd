from __future__ import annotations

import dataclasses

import msgspec
import pytest

from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_choice import TokenChoice


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
        ("temperature", 2.01),
        ("temperature", 10**400),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 0.0099),
        ("repetition_penalty", 100.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", 2**63),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: 10**400}),
        pytest.param("seed", 10**5000, id="seed of 5000 digits"),
        ("stop", ("",)),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("stop", 10),
        ("stop", {"x"}),
        ("stop", ["x", 10]),
        ("stop", b"x"),
        ("stop", None),
        ("stop_token_ids", 7),
        ("stop_token_ids", "7"),
        ("stop_token_ids", {7}),
        ("stop_token_ids", (-1,)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("stop", "kept"), [("END", ("END",)), (["a", "END"], ("a", "END")), (("END",), ("END",)), ([], ())]
)
def test_stop_strings_are_kept_as_a_tuple_however_they_are_written(stop, kept):
    params = SamplingParams(stop=stop)
    assert params.stop == kept
    assert params == SamplingParams(stop=kept) == dataclasses.replace(params)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_stop_token_ids_are_kept_as_a_tuple():
    params = SamplingParams(stop_token_ids=[3, 7])
    assert params.stop_token_ids == (3, 7)
    assert params == SamplingParams(stop_token_ids=(3, 7)) == dataclasses.replace(params)


def test_edges_are_accepted():
    SamplingParams(
        max_tokens=0, temperature=0, top_k=-1, top_p=1, min_p=0, seed=-(2**63), logprobs=0, presence_penalty=-2
    )
    SamplingParams(temperature=2, repetition_penalty=0.01)
    SamplingParams(repetition_penalty=100)


def test_fields_left_open_are_the_models_and_others_stay():
    defaults = TokenChoice(temperature=0.2, top_k=7, repetition_penalty=1.1)
    params = SamplingParams(max_tokens=3, temperature=0.0, top_p=1.0)
    choice = TokenChoice(temperature=0.0, top_k=7, top_p=1.0, repetition_penalty=1.1)
    assert params.choice(defaults) == choice
    assert params.with_defaults(defaults) == dataclasses.replace(params, top_k=7, min_p=0.0, repetition_penalty=1.1)
    assert SamplingParams().choice(TokenChoice()).changes() == {}
    assert choice.changes() == {"temperature": 0.0, "top_k": 7, "repetition_penalty": 1.1}
