import math

import pytest
import torch

from moeflow.kernels.cpu import row_ops
from moeflow.kernels.routing import softmax_topk, within_capacity


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def _by(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(row_ops, "_AVAILABLE", False)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(0, 4, 2), (1, 1, 1), (5, 8, 2), (9, 64, 8), (3, 4, 4)]
)
def test_the_likeliest_experts_are_chosen_in_order(num_tokens, num_experts, top_k, renormalize):
    torch.manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts) * 2
    ids, weights = softmax_topk(logits, top_k, renormalize=renormalize)
    assert ids.shape == weights.shape == (num_tokens, top_k)
    for row, chosen, got in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        likely = sorted(range(num_experts), key=lambda e: -row[e])[:top_k]
        assert chosen == likely
        over = likely if renormalize else range(num_experts)
        total = sum(math.exp(row[e]) for e in over)
        assert got == pytest.approx([math.exp(row[e]) / total for e in likely], abs=1e-6)


def test_weights_are_float32_whatever_the_scores():
    logits = torch.randn(4, 8).to(torch.bfloat16)
    ids, weights = softmax_topk(logits, 2, renormalize=True)
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(4))


def test_an_expert_takes_the_first_tokens_of_each_sequence():
    torch.manual_seed(0)
    lengths, capacity = [7, 12, 1], 2
    ids, weights = torch.randint(0, 3, (sum(lengths), 2)), torch.rand(sum(lengths), 2)
    expected, start = [], 0
    for length in lengths:
        taken = dict.fromkeys(range(3), 0)
        for row in range(start, start + length):
            for chosen, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
                taken[chosen] += 1
                expected.append(weight if taken[chosen] <= capacity else 0.0)
        start += length
    assert within_capacity(ids, weights, lengths, capacity).flatten().tolist() == expected
