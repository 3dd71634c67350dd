"""Loss, boost weights and coverage against plain definitions."""

import math

import torch

from moeflow.train.speculators.coverage import coverage
from moeflow.train.speculators.loss import COVERED_WEIGHT, SAID_SHARE, boost_weights, distillation_loss


def test_the_loss_is_the_cross_entropy_to_the_targets_distribution_and_its_token():
    torch.manual_seed(0)
    logits = torch.randn(5, 7)
    likeliest = torch.tensor([[0, 3], [1, -1], [2, 6], [-1, 4], [5, 0]])
    logprobs = torch.log(torch.tensor([[0.5, 0.3], [0.6, 0.2], [0.4, 0.1], [0.7, 0.1], [0.9, 0.05]]))
    said = torch.tensor([0, 1, -1, 4, 0])
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])
    total = 0.0
    for row in range(5):
        log_q = [float(x) - math.log(sum(math.exp(float(y)) for y in logits[row])) for x in logits[row]]
        pairs = [(int(t), math.exp(float(p))) for t, p in zip(likeliest[row], logprobs[row], strict=True) if t >= 0]
        mass = sum(p for _, p in pairs)
        soft = -sum(p / mass * log_q[t] for t, p in pairs)
        hard = -log_q[int(said[row])] if said[row] >= 0 else 0.0
        total += float(weights[row]) * ((1 - SAID_SHARE) * soft + SAID_SHARE * hard)
    found = distillation_loss(logits, likeliest, logprobs, said, weights)
    assert math.isclose(float(found), total / float(weights.sum()), rel_tol=1e-5)


def test_boosting_shifts_weight_to_where_those_before_were_wrong():
    covered = torch.tensor([True, False, True, False, True])
    weights = boost_weights(covered)
    assert torch.isclose(weights.mean(), torch.tensor(1.0))
    assert torch.allclose(weights[covered] / weights[~covered][0], torch.tensor(COVERED_WEIGHT))
    assert torch.equal(boost_weights(torch.zeros(4, dtype=torch.bool)), torch.ones(4))


def test_coverage_is_that_of_brute_force():
    torch.manual_seed(1)
    said = torch.randint(0, 6, (40,))
    drafts = [torch.stack([torch.randperm(6)[:3] for _ in range(40)]) for _ in range(3)]
    for number in (1, 3):
        expected = [
            sum(any(int(said[row]) in each[row, :number].tolist() for each in drafts[:n]) for row in range(40)) / 40
            for n in (1, 2, 3)
        ]
        assert torch.allclose(torch.tensor(coverage(drafts, said, number)), torch.tensor(expected))
