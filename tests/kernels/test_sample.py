"""Sampled tokens against the plain definition in numpy's float64, by the extension, by NumPy and as on a GPU."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moeflow.kernels.cpu import extension, row_ops
from moeflow.kernels.sample import NUCLEUS_WIDTH, RowSampling, sample_rows
from moeflow.kernels.triton import launching

INF = math.inf
ASKED = [
    {},
    {"temperature": 0.3},
    {"temperature": 4.0, "min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 700, "temperature": 3.0},
    {"top_k": 1500, "top_p": 0.95, "temperature": 6.0},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 5.0},
    {"top_p": 1e-9},
    {"top_k": 30, "top_p": 0.7, "min_p": 0.05},
    {"top_p": 0.8, "min_p": 0.1},
]
SIZES = [1, 5, 16, 255, 257, 1000, 5000]


@pytest.fixture(params=["kernels", "numpy", "gpu"])
def by(request, monkeypatch):
    if request.param == "gpu":
        pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    if request.param != "kernels":
        monkeypatch.setattr(row_ops, "_AVAILABLE", False)
        monkeypatch.setattr(launching, "accepts", lambda _: request.param == "gpu")
    elif extension.is_available():
        extension.set_num_threads(1)
    if request.param != "gpu":
        yield request.param
        return
    from tests.kernels.triton.interpreting import language_patched_once  # Triton has no wheel for some machines

    with language_patched_once():
        yield request.param


def make_sampling(row, number, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return RowSampling(row, temperature, top_k, top_p, min_p, number)


def make_logits(rows, size, seed=0, scale=3.0):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def expected(logits, one):
    """Return (tokens in order, their cumulative share of what may be sampled): float64, by definition."""
    scores = logits[one.row].double().numpy()
    weights = np.exp((scores - scores.max()) / one.temperature)
    order = np.arange(len(weights))
    if one.top_k or one.top_p < 1.0:
        order = np.argsort(-scores, kind="stable")
    weights = weights[order]
    weights[one.top_k or len(weights) :] = 0.0
    before = weights.cumsum() - weights
    if one.top_p < 1.0:
        weights[before >= one.top_p * weights.sum()] = 0.0
    weights[weights < max(one.min_p, 1.3e-38)] = 0.0
    return order, weights.cumsum() / weights.sum()


def assert_sampled(logits, one, token, tolerance=3e-6):
    """Fail unless the number lies in the token's part of the distribution, give or take what rounding explains."""
    order, cumulative = expected(logits, one)
    place = int((order == token).argmax())
    before = cumulative[place - 1] if place else 0.0
    assert before - tolerance <= one.number <= cumulative[place] + tolerance
    assert logits[one.row, token] > -INF


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_tokens_are_where_the_numbers_fall(by, asked, size):
    logits = make_logits(3, size, seed=size)
    numbers = (0.0, 0.31, 0.77, 1 - 2**-53) if by != "gpu" else (0.0, 0.77)  # interpreted kernels are slow
    rows = range(3) if by != "gpu" else [1]
    samplings = [make_sampling(row, number, **asked) for row in rows for number in numbers]
    for one, token in zip(samplings, sample_rows(logits, samplings), strict=True):
        assert_sampled(logits, one, token)


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_under_every_instruction_set(isa, asked):
    logits = make_logits(2, 3000)
    samplings = [make_sampling(row, number, **asked) for row in range(2) for number in (0.02, 0.5, 0.98)]
    for one, token in zip(samplings, sample_rows(logits, samplings), strict=True):
        assert_sampled(logits, one, token)


rows_strategy = st.lists(st.sampled_from([-INF, -60.0, -2.0, -1.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=70)


@settings(max_examples=60)
@given(
    rows_strategy,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0, 1, 3, 20]),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1]),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_ties_and_barred_tokens(values, temperature, top_k, top_p, min_p, number):
    logits = torch.tensor([values])
    assume(logits.max() > -INF)
    one = make_sampling(0, number, temperature, min(top_k, len(values)), top_p, min_p)
    order, cumulative = expected(logits, one)
    borders = np.append(cumulative, 0.0)
    assume(np.abs(borders - number).min() > 1e-6 or number == 0.0)
    if top_p < 1.0:  # where a token begins just at the nucleus' share, rounding decides whether it is in
        scores = logits[0].double().numpy()[order]
        weights = np.exp((scores - scores[0]) / temperature)
        weights[one.top_k or len(weights) :] = 0.0
        assume(np.abs(weights.cumsum() / weights.sum() - top_p).min() > 1e-6)
    assert sample_rows(logits, [one]) == [int(order[(cumulative > number).argmax()])]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_row_gives_the_same_in_any_batch(needs_kernels, asked):
    logits = make_logits(9, 20000, scale=1.0)
    samplings = [make_sampling(row, (row * 0.618) % 1, **asked) for row in range(9)]
    together = sample_rows(logits, samplings)  # by two threads
    alone = [sample_rows(logits[one.row : one.row + 1], [one._replace(row=0)])[0] for one in samplings]
    assert together == alone
    assert sample_rows(logits, samplings[::-1]) == together[::-1]


def test_a_wide_nucleus_and_a_narrow_one(by):
    for scale in (0.01, 3.0):
        logits = make_logits(1, 8 * NUCLEUS_WIDTH, scale=scale)
        samplings = [make_sampling(0, number, top_p=0.9) for number in (0.01, 0.6, 0.99)]
        for one, token in zip(samplings, sample_rows(logits, samplings), strict=True):
            assert_sampled(logits, one, token)


def test_masked_tokens_are_never_sampled(by):
    logits = torch.full((1, 600), -INF)
    logits[0, [3, 299, 300, 550]] = 1.0
    for asked in ({}, {"top_k": 9}, {"top_p": 0.99}):
        samplings = [make_sampling(0, number, **asked) for number in (0.0, 0.3, 0.6, 1 - 2**-53)]
        sampled = sample_rows(logits, samplings)
        assert sorted(sampled) == [3, 299, 300, 550]
        assert asked or sampled == sorted(sampled)


def test_at_a_tiny_temperature_only_the_likeliest_is_left(by):
    logits = make_logits(1, 1000)
    for asked in ({}, {"top_k": 9}, {"top_p": 0.99}):
        assert sample_rows(logits, [make_sampling(0, 0.99, 1e-6, **asked)]) == [logits.argmax().item()]


def test_rows_may_be_drawn_from_twice_or_not_at_all(by):
    logits = torch.eye(3) * 100
    assert sample_rows(logits, [make_sampling(row, 0.5) for row in (2, 0, 2)]) == [2, 0, 2]
    assert sample_rows(logits, []) == []


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (4, 7), (3, 200), (3, 70000)])
def test_without_a_temperature_it_is_the_likeliest_and_the_first_of_equals(by, num_rows, size):
    logits = make_logits(num_rows, size)
    logits[0] = logits[0].round()
    samplings = [RowSampling(row, top_k=3, top_p=0.5, number=0.9) for row in range(num_rows)]
    assert sample_rows(logits, samplings) == [row.index(max(row)) for row in logits.tolist()]


def test_a_row_without_a_largest_number_has_no_token(by):
    logits = torch.zeros(3, 40)
    logits[0], logits[1, 5], logits[2, 5] = -INF, math.nan, INF
    for asked in ({}, {"top_k": 9}, {"top_p": 0.9}, {"temperature": 0.0}):
        assert sample_rows(logits, [make_sampling(row, 0.5, **asked) for row in range(3)]) == [-1] * 3


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there_is_refused(needs_kernels, row):
    with pytest.raises(IndexError, match="not there"):
        sample_rows(torch.zeros(2, 4), [RowSampling(row, 1.0)])
