"""Shares counted one by one, and the loss from its definition."""

import math
import random

import pytest
import torch

from moeflow.train.predictors.hit_rates import count_uses, hit_rates
from moeflow.train.predictors.loss import CROSS_ENTROPY_WEIGHT, routing_loss


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (16, 4), (2, 1)])
def test_hits_are_those_that_brute_force_counts(num_experts, top_k):
    rng = random.Random(num_experts)
    num_tokens, num_layers = 30, 3
    drafted = [[rng.sample(range(num_experts), num_experts) for _ in range(num_layers)] for _ in range(num_tokens)]
    wanted = [[rng.sample(range(num_experts), num_experts) for _ in range(num_layers)] for _ in range(num_tokens)]
    logits = torch.zeros(num_tokens, num_layers, num_experts)
    for token, layers in enumerate(drafted):
        for layer, order in enumerate(layers):
            for rank, expert in enumerate(order):
                logits[token, layer, expert] = -rank
    uses = count_uses(torch.tensor(wanted), num_experts, top_k)
    rates = hit_rates(logits, torch.tensor(wanted), top_k, uses)
    for layer in range(num_layers):
        pairs = [(drafted[token][layer], wanted[token][layer]) for token in range(num_tokens)]
        counts = [sum(expert in want[:top_k] for _, want in pairs) for expert in range(num_experts)]
        assert uses[layer].tolist() == counts
        assert rates.top1[layer] == pytest.approx(sum(draft[0] == want[0] for draft, want in pairs) / num_tokens)
        assert rates.top3[layer] == pytest.approx(sum(want[0] in draft[:3] for draft, want in pairs) / num_tokens)
        hits = sum(len({*draft[:top_k]} & {*want[:top_k]}) for draft, want in pairs)
        assert rates.top_k[layer] == pytest.approx(hits / num_tokens / top_k)
        most = sum(sorted(counts)[-top_k:])
        assert rates.most_used[layer] == pytest.approx(most / num_tokens / top_k)
    assert rates.mean()["top1"] == pytest.approx(sum(rates.top1) / num_layers)


@pytest.mark.parametrize("is_truncated", [False, True])
def test_the_loss_is_the_divergence_over_the_teachers_likeliest_and_a_little_cross_entropy(is_truncated):
    torch.manual_seed(0)
    logits, experts = torch.randn(5, 2, 6), torch.randn(5, 2, 6).argsort(-1)[..., :3]
    teacher = torch.randn(5, 2, 3).sort(-1, descending=True).values
    expected = 0.0
    for token in range(5):
        for layer in range(2):
            p, q = softmax(teacher[token, layer].tolist()), softmax(logits[token, layer].tolist())
            chosen = experts[token, layer].tolist()
            total = sum(q[expert] for expert in chosen) if is_truncated else 1.0
            expected += sum(a * math.log(a * total / q[expert]) for a, expert in zip(p, chosen, strict=True))
            expected -= CROSS_ENTROPY_WEIGHT * math.log(q[chosen[0]])
    assert float(routing_loss(logits, experts, teacher, is_truncated=is_truncated)) == pytest.approx(
        expected / 10, rel=1e-4
    )


def softmax(values):
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]
