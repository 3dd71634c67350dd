"""The sampler against transformers' logits processors, against numpy by brute force, and against counts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moeflow.core.batch import BatchEntry
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.logprobs import prompt_logprobs
from moeflow.engine.random_numbers import uniform
from moeflow.engine.verification import verify
from moeflow.kernels.sample import NUCLEUS_WIDTH

VOCAB = 40


@pytest.fixture(scope="module", params=["host", "gpu"], autouse=True)
def by(request):
    """The sampler of the host, then that of a GPU, whose kernels an interpreter runs."""
    if request.param == "host":
        yield request.param
        return
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    from tests.kernels.triton.launches import triton_alone

    with triton_alone():
        yield request.param


def make_request(prompt=(1, 2), output=(), stop_token_ids=(), seed=0, **params):
    return Request(
        "r",
        list(prompt),
        SamplingParams(**params),
        max_tokens=100,
        stop_token_ids=frozenset(stop_token_ids),
        seed=seed,
        output_token_ids=list(output),
    )


def make_logits(rows, vocab=VOCAB, seed=0, scale=2.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample(logits, requests):
    entries = [BatchEntry(request, 0, 1, (0,), samples=True) for request in requests]
    return [token for one in verify(logits, entries) for token in one.tokens]


def tokens(logits, requests):
    sampled = sample(logits, requests)
    assert all(token.error is None for token in sampled)
    return [token.token_id for token in sampled]


def expected_distribution(logits, request):
    """What transformers' own processors make of one row: float64 numpy, [V]."""
    params, choice = request.sampling, request.choice
    scores = logits.double().clone()
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    if len(request.output_token_ids) < params.min_tokens:
        for token_id in request.stop_token_ids:
            scores[token_id] = -math.inf
    ids = torch.tensor([request.prompt_token_ids + request.output_token_ids])
    if choice.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(choice.repetition_penalty)(ids, scores[None])[0]
    for token_id in set(request.output_token_ids):
        count = request.output_token_ids.count(token_id)
        scores[token_id] -= params.presence_penalty + params.frequency_penalty * count
    warpers = LogitsProcessorList()
    if choice.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(choice.temperature))
    if choice.top_k > 0:
        warpers.append(TopKLogitsWarper(choice.top_k))
    if choice.top_p < 1.0:
        warpers.append(TopPLogitsWarper(choice.top_p))
    if choice.min_p > 0.0:
        warpers.append(MinPLogitsWarper(choice.min_p))
    return warpers(ids, scores[None])[0].softmax(-1).numpy()


def expected_token(logits, request):
    """Invert the cumulative distribution by hand: in the sampler's order of tokens, which top-k and top-p sort."""
    probabilities = expected_distribution(logits, request)
    choice = request.choice
    is_sorted = choice.top_p < 1.0 or 0 < choice.top_k < len(probabilities)
    order = np.argsort(-probabilities, kind="stable") if is_sorted else np.arange(len(probabilities))
    number = uniform(request.seed, len(request.output_token_ids))
    total = 0.0
    for token_id in order:
        total += probabilities[token_id]
        if total > number:
            return int(token_id)
    raise AssertionError("probabilities sum to less than the number drawn")


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": VOCAB + 7},
    {"top_k": -1},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.6},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    {"top_p": 0.8, "min_p": 0.2},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5, "top_k": 10},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"frequency_penalty": -2.0},
    {"logit_bias": {3: 5.0, 4: -100.0}},
    {"min_tokens": 9, "top_k": 3},
    {"logit_bias": {2: 90.0}, "min_tokens": 9, "repetition_penalty": 1.2, "presence_penalty": 1.0, "top_p": 0.7},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_follow_transformers_filtered_distribution(params, by):
    logits, num_draws = make_logits(1, seed=3), 60 if by == "host" else 4  # interpreted kernels are slow
    params = {"temperature": 1.0, "max_tokens": None, **params}
    requests = [
        make_request(prompt=[1, 5, 6], output=[7, 7, 2], stop_token_ids=[2, 9], seed=seed, **params)
        for seed in range(num_draws)
    ]
    got = tokens(logits.expand(num_draws, -1), requests)
    assert got == [expected_token(logits[0], request) for request in requests]


@pytest.mark.parametrize("params", [{}, {"top_k": 12, "top_p": 0.9}, {"min_p": 0.05, "temperature": 1.4}], ids=str)
def test_frequencies_match_probabilities(params, by):
    if by == "gpu":
        pytest.skip("thousands of draws take minutes by interpreted kernels")
    logits = make_logits(1, vocab=16, seed=5)
    draws = 4000
    requests = [make_request(seed=seed, **params) for seed in range(draws)]
    expected = expected_distribution(logits[0], requests[0]) * draws
    counts = np.bincount(tokens(logits.expand(draws, -1), requests), minlength=16)
    assert counts[expected == 0].sum() == 0
    likely = expected > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 39.3  # 0.1% quantile at 16 degrees of freedom


params_strategy = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 4, 20]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "min_tokens": st.sampled_from([0, 3]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@settings(max_examples=40)
@given(st.lists(st.tuples(params_strategy, st.integers(0, 99)), min_size=1, max_size=8), st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_batch_mates(by, rows, logits_seed):
    if by == "gpu":
        pytest.skip("hundreds of draws take long by interpreted kernels")
    logits = torch.round(make_logits(len(rows), seed=logits_seed))  # rounding makes ties
    requests = [
        make_request(output=[3, 4], stop_token_ids=[0], seed=seed, max_tokens=None, **params) for params, seed in rows
    ]
    together = sample(logits, requests)
    alone = [sample(logits[i : i + 1], [request])[0] for i, request in enumerate(requests)]
    assert together == alone
    assert sample(logits.flip(0), requests[::-1]) == together[::-1]


def test_requests_of_all_kinds_share_a_pass():
    logits = torch.round(make_logits(6, seed=8))
    kinds = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 0},
        {"min_p": 0.1, "frequency_penalty": 0.5},
        {"top_k": 9, "logprobs": 3},
        {"top_p": 0.8, "min_tokens": 5, "logit_bias": {3: 2.0}, "logprobs": 20},
        {"temperature": 0.7},
    ]
    requests = [
        make_request(output=[3, 4], stop_token_ids=[0], seed=seed, max_tokens=None, **kind)
        for seed, kind in enumerate(kinds)
    ]
    together = sample(logits, requests)
    assert together == [sample(logits[i : i + 1], [request])[0] for i, request in enumerate(requests)]
    assert sample(logits.flip(0), requests[::-1]) == together[::-1]


def test_logits_are_left_as_they_were():
    logits = make_logits(3)
    before = logits.clone()
    sample(logits, [make_request(temperature=0.0), make_request(logit_bias={1: 9.0}), make_request(top_p=0.5)])
    assert torch.equal(logits, before)


def test_greedy_takes_the_likeliest_and_the_first_of_equals():
    logits = torch.zeros(2, VOCAB)
    logits[0, 17] = 1.0
    assert tokens(logits, [make_request(temperature=0.0), make_request(temperature=0.0)]) == [17, 0]


def test_greedy_with_penalty_and_bias():
    logits = torch.zeros(3, VOCAB)
    logits[:, 5], logits[:, 6] = 2.0, 1.5
    requests = [
        make_request(prompt=[5], temperature=0.0, repetition_penalty=2.0),
        make_request(output=[5], temperature=0.0, presence_penalty=1.0),
        make_request(temperature=0.0, logit_bias={9: 50.0}),
    ]
    assert tokens(logits, requests) == [6, 6, 9]


def test_stop_tokens_are_barred_before_min_tokens_only():
    logits = torch.zeros(2, VOCAB)
    logits[:, 2] = 50.0
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [2]}
    first, third = (make_request(output=output, **params) for output in ([8], [8, 8]))
    got = tokens(logits, [first, third])
    assert got[0] != 2
    assert got[1] == 2


def test_the_number_drawn_depends_on_seed_and_output_position():
    logits = torch.zeros(1, 1000)
    draws = {
        (seed, length): tokens(logits, [make_request(seed=seed, output=[1] * length)])[0]
        for seed in range(3)
        for length in range(3)
    }
    assert len(set(draws.values())) > 6
    assert all(token == int(uniform(*key) * 1000) for key, token in draws.items())


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_row_of_bad_logits_fails_alone(bad):
    logits = make_logits(4)
    logits[1, 7] = bad
    logits[3] = -math.inf
    for params in ({"temperature": 0.0}, {"top_p": 0.9}, {"logprobs": 2}):
        requests = [make_request(seed=i, **params) for i in range(4)]
        sampled = sample(logits, requests)
        assert [token.error is not None for token in sampled] == [False, True, False, True]
        assert "finite" in sampled[1].error
        assert sampled[2] == sample(logits[2:3], requests[2:3])[0]


def test_barring_every_token_is_an_error_of_that_row():
    request = make_request(stop_token_ids=range(VOCAB), min_tokens=1)
    sampled = sample(make_logits(2), [request, make_request()])
    assert "bar every token" in sampled[0].error
    assert sampled[1].error is None


def test_tiny_temperature_is_greedy_and_not_a_number_error():
    logits = make_logits(2)
    requests = [make_request(temperature=1e-300), make_request(temperature=1e-5, top_p=0.9)]
    assert tokens(logits, requests) == logits.argmax(-1).tolist()


def test_no_rows():
    assert sample(torch.zeros(0, VOCAB), []) == []


@pytest.mark.parametrize("scale", [0.01, 3.0], ids=["wide nucleus", "narrow nucleus"])
@pytest.mark.parametrize("top_p", [0.2, 0.9])
def test_top_p_on_a_large_vocabulary(scale, top_p, by):
    num_draws = 12 if by == "host" else 2
    logits = make_logits(1, vocab=4 * NUCLEUS_WIDTH, seed=11, scale=scale)
    requests = [make_request(seed=seed, top_p=top_p) for seed in range(num_draws)]
    got = tokens(logits.expand(num_draws, -1), requests)
    assert got == [expected_token(logits[0], request) for request in requests]


def test_logprobs_are_the_models_own():
    logits = make_logits(2, seed=9)
    params = {"logprobs": 3, "temperature": 0.4, "logit_bias": {8: 100.0}, "top_k": 2}
    sampled = sample(logits, [make_request(**params), make_request(temperature=0.0, logprobs=0)])
    reference = torch.log_softmax(logits.double(), -1)
    first = sampled[0].logprobs
    assert first.token_id == sampled[0].token_id == 8
    assert first.logprob == pytest.approx(reference[0, 8].item(), abs=1e-5)
    assert first.rank == (reference[0] > reference[0, 8]).sum().item() + 1
    assert [token for token, _ in first.top] == reference[0].topk(3).indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(reference[0].topk(3).values.tolist(), abs=1e-5)
    assert sampled[1].logprobs.rank == 1
    assert sampled[1].logprobs.top == []


def test_rows_that_do_not_ask_get_no_logprobs():
    sampled = sample(make_logits(2), [make_request(), make_request(logprobs=1)])
    assert sampled[0].logprobs is None
    assert len(sampled[1].logprobs.top) == 1


def test_prompt_logprobs_equal_a_plain_log_softmax():
    logits = make_logits(150, seed=2)
    token_ids = [i % VOCAB for i in range(150)]
    got = prompt_logprobs(logits, token_ids, num_top=2)
    reference = torch.log_softmax(logits, -1)
    assert [item.token_id for item in got] == token_ids
    assert [item.logprob for item in got] == pytest.approx(
        [reference[i, token].item() for i, token in enumerate(token_ids)], abs=1e-5
    )
    assert all(item.top[0][1] >= item.top[1][1] for item in got)
    assert all((item.rank == 1) == (item.top[0][0] == item.token_id) for item in got)
