"""What can be refused is refused at once, with the parameter to blame and what would be right."""

import msgspec
import pytest

from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_choice import TokenChoice
from moeflow.engine.admission import check_request, encode_prompt, make_submissions
from moeflow.engine.random_numbers import child_seed
from tests.engine.fakes import byte_level_tokenizer
from tests.shapes import INFO

MODEL = msgspec.structs.replace(INFO, vocab_size=100, max_model_len=10)
ENGINE = TokenChoice()


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([], {}, "prompt", "the prompt is empty"),
        ([1, 100], {}, "prompt", "token id 100; this model's token ids go from 0 to 99"),
        ([-1], {}, "prompt", "token id -1"),
        ([1] * 10, {"max_tokens": None}, "prompt", "has 10 tokens; the context of 10 tokens"),
        ([1] * 10, {"max_tokens": 0}, "prompt", "at least one more"),
        ([1] * 4, {"max_tokens": 7}, "max_tokens", "max_tokens may be at most 6"),
        ([1], {"max_tokens": 1, "logit_bias": {100: 1.0}}, "logit_bias", "token id 100"),
        ([1], {"max_tokens": 1, "stop_token_ids": (5, 100)}, "stop_token_ids", "token id 100"),
        ([1], {"max_tokens": 1, "min_tokens": 1, "stop_token_ids": tuple(range(100))}, "stop_token_ids", "every token"),
    ],
)
def test_requests_that_can_never_run(prompt, params, param, message):
    with pytest.raises(RequestError, match=message) as caught:
        check_request(MODEL, prompt, SamplingParams(**params))
    assert caught.value.param == param


@pytest.mark.parametrize("params", [{"max_tokens": 6}, {"max_tokens": None}, {"max_tokens": 0}])
def test_requests_that_just_fit(params):
    check_request(MODEL, [0, 99, 1, 1], SamplingParams(**params))


def test_text_and_token_ids_are_prompts():
    tokenizer = byte_level_tokenizer()
    assert encode_prompt(tokenizer, "the fox") == tokenizer.encode("the fox")
    assert encode_prompt(tokenizer, (3, 4)) == [3, 4]


@pytest.mark.parametrize("prompt", ["", [], [1, "x"], [True], [1.5], None, 5])
def test_what_is_no_prompt(prompt):
    with pytest.raises(RequestError) as caught:
        encode_prompt(byte_level_tokenizer(), prompt)
    assert caught.value.param == "prompt"


def test_each_completion_has_its_own_seed_and_the_first_the_requests_own():
    submissions = make_submissions("r", [1, 2], SamplingParams(n=3, seed=42), defaults=ENGINE)
    assert [submission.request_id for submission in submissions] == ["r-0", "r-1", "r-2"]
    assert [submission.seed for submission in submissions] == [child_seed(42, index) for index in range(3)]
    assert submissions[0].seed == 42


def test_without_seed_every_request_differs():
    seeds = {s.seed for _ in range(5) for s in make_submissions("r", [1], SamplingParams(n=2), defaults=ENGINE)}
    assert len(seeds) == 10


def test_fields_left_open_are_the_models():
    defaults = TokenChoice(temperature=0.3, top_k=5)
    (submission,) = make_submissions("r", [1], SamplingParams(top_k=9), defaults=defaults)
    assert submission.sampling == SamplingParams(top_k=9).with_defaults(defaults)
    assert (submission.sampling.temperature, submission.sampling.top_k, submission.sampling.top_p) == (0.3, 9, 1.0)


def test_prompt_logprobs_are_asked_for_once():
    submissions = make_submissions("r", [1, 2], SamplingParams(n=2, prompt_logprobs=1), defaults=ENGINE)
    assert [submission.sampling.prompt_logprobs for submission in submissions] == [1, None]


def test_stop_strings_are_bounded():
    SamplingParams(stop=("x" * 1024,))
    with pytest.raises(RequestError, match="1025 characters; at most 1024") as caught:
        SamplingParams(stop=("a", "x" * 1025))
    assert caught.value.param == "stop"
