"""Choices of experts by kernels and by torch, against plain definitions in float64."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kernels.cpu import extension, row_ops
from moeflow.kernels.routing import Routing

INF, NAN = math.inf, math.nan
SHAPES = [(0, 4, 2), (1, 1, 1), (5, 8, 2), (9, 64, 8), (3, 4, 4), (7, 33, 17), (2, 17, 17), (70, 128, 8)]
ROUTINGS = {
    "mixtral": {"renormalize": True},
    "olmoe": {},
    "deepseek_v2": {"num_groups": 4, "num_chosen_groups": 2, "scale": 16.0},
    "deepseek_v3": {
        "score": "sigmoid",
        "choice_bias": True,
        "num_groups": 8,
        "num_chosen_groups": 4,
        "group_score": "top2_sum",
        "renormalize": True,
        "epsilon": 1e-20,
        "scale": 2.5,
    },
    "ernie4_5_moe": {"choice_bias": True, "renormalize": True, "min_total": 1e-12},
    "lfm2_moe": {"score": "sigmoid", "renormalize": True, "epsilon": 1e-6},
    "phimoe": {"score": "sparsemixer", "jitter": 0.2},
    "gemma4": {"renormalize": True, "expert_scales": True},
    "of_groups_sums": {"num_groups": 2, "num_chosen_groups": 1, "group_score": "top2_sum"},
}

WITH_SHARED = {  # on a GPU
    "dots1": {"score": "sigmoid", "choice_bias": True, "scale": 2.5, "num_shared": 2},
    "qwen2_moe": {"num_shared": 3, "has_shared_gate": True},
}


@pytest.fixture(params=["kernels", "torch"])
def by(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(row_ops, "_AVAILABLE", False)
    return request.param


def make(top_k, num_experts, settings):
    of_experts = {name: torch.randn(num_experts) / 4 for name in ("choice_bias", "expert_scales") if name in settings}
    return Routing(top_k, **(settings | of_experts))


def plain(logits, routing):
    """Return ids and weights of one token, in Python's own numbers."""
    if routing.num_shared:
        num_experts = len(logits) - routing.has_shared_gate
        ids, weights = plain(logits[:num_experts], dataclasses.replace(routing, num_shared=0, has_shared_gate=False))
        share = 1 / (1 + math.exp(-logits[-1])) if routing.has_shared_gate else 1.0
        shared = range(num_experts, num_experts + routing.num_shared)
        return ids + list(shared), weights + [share] * len(shared)
    if routing.score == "sparsemixer":
        return plain_sparsemixer(logits, routing)
    experts = range(len(logits))
    total = sum(math.exp(x - max(logits)) for x in logits)
    if routing.score == "softmax":
        scores = [math.exp(x - max(logits)) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    bias = [0.0] * len(logits) if routing.choice_bias is None else routing.choice_bias.tolist()
    ranks = [score + more for score, more in zip(scores, bias, strict=True)]
    size = len(logits) // routing.num_groups
    groups = [sorted(ranks[first : first + size], reverse=True) for first in range(0, len(logits), size)]
    worth = [sum(group[: 2 if routing.group_score == "top2_sum" else 1]) for group in groups]
    chosen = sorted(range(routing.num_groups), key=lambda g: (-worth[g], g))[: routing.num_chosen_groups]
    ids = sorted((e for e in experts if e // size in chosen), key=lambda e: (-ranks[e], e))[: routing.top_k]
    weights = [scores[e] for e in ids]
    if routing.renormalize:
        whole = max(sum(weights) + routing.epsilon, routing.min_total)
        weights = [weight / whole for weight in weights]
    own = [1.0] * len(logits) if routing.expert_scales is None else routing.expert_scales.tolist()
    return ids, [weight * routing.scale * own[expert] for expert, weight in zip(ids, weights, strict=True)]


def plain_sparsemixer(logits, routing):
    ids, weights = [], []
    for _ in range(routing.top_k):
        left = [expert for expert in range(len(logits)) if expert not in ids]
        best = max(left, key=lambda expert: logits[expert])
        top = logits[best]
        near = [logits[e] for e in left if (top - logits[e]) / max(abs(logits[e]), top) <= 2 * routing.jitter]
        weights.append(1 / sum(math.exp(it - top) for it in near))
        ids.append(best)
    return ids, weights


@pytest.mark.parametrize("family", ROUTINGS | WITH_SHARED)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_experts_and_weights_are_as_defined(isa, by, family, num_tokens, num_experts, top_k):
    torch.manual_seed(num_tokens)
    routing = make(top_k, num_experts, (ROUTINGS | WITH_SHARED)[family])
    try:
        routing.check(num_experts)
    except ValueError:
        pytest.skip("no such groups")
    logits = torch.randn(num_tokens, num_experts + routing.has_shared_gate) * 2
    ids, weights = routing(logits)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert ids.shape == weights.shape == (num_tokens, top_k + routing.num_shared)
    for row, got_ids, got in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        want_ids, want = plain(row, routing)
        assert got_ids == want_ids
        assert got == pytest.approx(want, rel=5e-6, abs=1e-7)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_kernels_choose_what_torch_does(data):
    size, num_groups = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 6))
    chosen = data.draw(st.integers(1, num_groups))
    num_experts = size * num_groups
    values = st.sampled_from([-3.0, -0.5, 0.0, 0.5, 1.0, 4.0])  # with many equals
    bias = data.draw(st.none() | st.lists(values, min_size=num_experts, max_size=num_experts))
    routing = Routing(
        data.draw(st.integers(1, size * chosen)),
        renormalize=data.draw(st.booleans()),
        score=data.draw(st.sampled_from(["softmax", "sigmoid"])),
        choice_bias=None if bias is None else torch.tensor(bias),
        num_groups=num_groups,
        num_chosen_groups=chosen,
        group_score=data.draw(st.sampled_from(["max", "top2_sum"])),
        scale=data.draw(st.sampled_from([1.0, 2.5])),
    )
    logits = torch.tensor([data.draw(st.lists(values, min_size=num_experts, max_size=num_experts)) for _ in range(3)])
    ids, weights = routing(logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_ops, "_AVAILABLE", False)
        want_ids, want = routing(logits)
    if routing.choice_bias is None:  # else sums that rounding makes equal may differ
        assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.sort().values, want.sort().values, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ROUTINGS)
def test_arrays_of_numpy_give_the_same_bits(needs_kernels, family):
    routing, logits = make(3, 32, ROUTINGS[family]), torch.randn(5, 32)
    found = routing(logits.numpy())
    assert all(isinstance(it, np.ndarray) for it in found)
    for got, want in zip(found, routing(logits), strict=True):
        assert np.array_equal(got, want.numpy())


@pytest.mark.parametrize("family", ROUTINGS)
def test_a_choice_of_experts_has_the_same_bits_in_any_batch(isa, family):
    routing, logits = make(8, 128, ROUTINGS[family]), torch.randn(60, 128)
    extension.set_num_threads(2)
    try:
        whole = routing(logits)
    finally:
        extension.set_num_threads(1)
    for rows in (1, 2):
        parts = [routing(part.clone()) for part in logits.split(rows)]
        for got, want in zip(zip(*parts, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(got), want)


def test_of_equals_the_lower_number_comes_first(isa, by):
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0], [0.0] * 5, [-INF, 3.0, -INF, -INF, 3.0]])
    ids, weights = Routing(4, renormalize=True)(logits)
    assert ids.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [1, 4, 0, 2]]
    assert weights[1].tolist() == [0.25] * 4
    torch.testing.assert_close(weights[2], torch.tensor([0.5, 0.5, 0.0, 0.0]))
    groups = Routing(2, num_groups=3, num_chosen_groups=2)
    assert groups(torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]]))[0].tolist() == [[1, 2]]


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("family", ROUTINGS)
def test_scores_that_are_not_numbers_spoil_no_other_row(isa, value, family):
    routing = make(3, 32, ROUTINGS[family])
    for position in (0, 1, 7, 19):
        logits = torch.randn(3, 32)
        logits[1, position] = value
        ids, weights = routing(logits)
        if math.isnan(value) or routing.score == "softmax":
            assert weights.isnan().all(-1).tolist() == [False, True, False]
        assert all(len(set(row)) == 3 and set(row) <= set(range(32)) for row in ids.tolist())


def test_large_scores_do_not_overflow(isa, by):
    logits = torch.tensor([[3e38, -3e38, 3e38, 88.0], [-3e38, -2e38, -3e38, -3e38]])
    ids, weights = Routing(2)(logits)
    assert ids.tolist() == [[0, 2], [1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    ids, weights = Routing(2, score="sigmoid")(logits)
    assert ids.tolist() == [[0, 2], [1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_weights_are_float32_whatever_the_scores(by):
    ids, weights = Routing(2, renormalize=True)(torch.randn(4, 8).to(torch.bfloat16))
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(4))


@pytest.mark.parametrize(
    ("routing", "problem"),
    [
        ({"top_k": 0}, "0 of 8 experts cannot"),
        ({"top_k": 9}, "9 of 8 experts cannot"),
        ({"top_k": 5, "num_groups": 4, "num_chosen_groups": 2}, "5 of 4 experts cannot"),
        ({"top_k": 1, "num_groups": 3}, "8 experts cannot form 3 groups"),
        ({"top_k": 1, "num_groups": 4, "num_chosen_groups": 5}, "with 5 chosen ones"),
        ({"top_k": 1, "num_groups": 8, "group_score": "top2_sum"}, "groups of 1 have no two"),
        ({"top_k": 1, "choice_bias": torch.ones(7)}, r"float32 \[8\] is needed"),
        ({"top_k": 1, "expert_scales": torch.ones(7)}, r"float32 \[8\] is needed"),
        ({"top_k": 2, "score": "sparsemixer", "renormalize": True}, "not renormalised"),
    ],
)
def test_what_cannot_be_chosen_is_refused(needs_kernels, routing, problem):
    with pytest.raises(ValueError, match=problem):
        Routing(**routing)(torch.ones(1, 8))
