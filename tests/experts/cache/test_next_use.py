"""The policy that predicts next uses, against its definition in loops with torch's gradients, and its purpose."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.experts.cache.eviction import LRU, Belady, lowest
from moeflow.experts.cache.next_use import NextUse

NUM_LAYERS, NUM_EXPERTS = 3, 4
TOTAL = NUM_LAYERS * NUM_EXPERTS
HALF_LIVES = (4, 16, 64, 256)
PASSES = st.lists(
    st.lists(st.sets(st.integers(0, NUM_EXPERTS - 1), max_size=3), min_size=NUM_LAYERS, max_size=NUM_LAYERS),
    max_size=12,
)


class Plain:
    """The definition: no arrays, no caches, the gradient by torch."""

    def __init__(self):
        self.past = []  # the experts of each pass
        self.weights = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0], dtype=torch.float64)
        self.squares = torch.full((5,), 0.01, dtype=torch.float64)

    def features(self, past):
        """The knowledge after these passes; an expert's prior is the mean of the finished ones."""
        rows = []
        for half_life in HALF_LIVES:
            ages = [0.5 ** ((len(past) - 1 - at) / half_life) for at in range(len(past))]
            counts = [sum(age for age, used in zip(ages, past, strict=True) if it in used) for it in range(TOTAL)]
            over = [0.5 ** ((len(self.past) - 1 - at) / half_life) for at in range(len(self.past))]
            mean = (
                sum(age * len(used) for age, used in zip(over, self.past, strict=True)) / TOTAL / max(sum(over), 1e-3)
            )
            rates = [min(max((count + 2 * mean) / (sum(ages) + 2), 1e-3), 0.999) for count in counts]
            rows.append([np.log(rate / (1 - rate)) for rate in rates])
        return torch.tensor(rows, dtype=torch.float64)

    def log_odds(self, features, weights):
        return (weights[:4] @ features + weights[4]).clamp(-12, 12)

    def end_pass(self, used):
        weights = self.weights.clone().requires_grad_()
        log_odds = self.log_odds(self.features(self.past), weights)
        labels = torch.tensor([float(it in used) for it in range(TOTAL)], dtype=torch.float64)
        torch.nn.functional.binary_cross_entropy_with_logits(log_odds, labels).backward()
        self.squares += weights.grad**2
        self.weights -= 0.1 * weights.grad / self.squares.sqrt()
        self.past.append(used)

    def scores(self, layer, used):
        """In a pass that has reached `layer` and used these."""
        found = []
        for it in range(TOTAL):
            is_behind = it // NUM_EXPERTS <= layer
            past = [*self.past, used] if is_behind else self.past
            odds = torch.exp(self.log_odds(self.features(past), self.weights))[it].item()
            away = it // NUM_EXPERTS + (NUM_LAYERS if is_behind else 0)
            found.append(-(away + NUM_LAYERS / odds))
        return found


def numbers(layer, experts):
    return np.array([layer * NUM_EXPERTS + expert for expert in sorted(experts)], np.int64)


@settings(max_examples=40, deadline=None)
@given(PASSES)
def test_scores_are_those_of_the_definition(passes):
    policy, plain = NextUse(NUM_LAYERS, NUM_EXPERTS), Plain()
    for now, needed in enumerate(passes):
        used = set()
        assert policy.scores(now) == pytest.approx(plain.scores(-1, used), rel=1e-9)
        for layer, experts in enumerate(needed):
            policy.on_use(numbers(layer, experts or {0}), now)
            used |= set(numbers(layer, experts or {0}).tolist())
            assert policy.scores(now) == pytest.approx(plain.scores(layer, used), rel=1e-9)
        plain.end_pass(used)


def test_what_is_behind_a_layer_is_known_before_it():
    policy = NextUse(NUM_LAYERS, NUM_EXPERTS)
    for now in range(5):
        policy.on_use(np.array([now % 4, 4, 9]), now)
    used, unused = policy.scores_behind(5)
    policy.on_use(np.array([1]), 5)
    assert policy.scores(5)[1] == used[1]
    assert (policy.scores(5)[[0, 2, 3]] == unused[[0, 2, 3]]).all()


def hits(policy, passes, num_slots):
    """Serve passes layer by layer; return how many experts were there when they were needed."""
    resident, found = np.zeros(TOTAL, bool), 0
    for now, needed in enumerate(passes):
        for layer, experts in enumerate(needed):
            wanted = numbers(layer, experts)
            policy.on_use(wanted, now)
            found += int(resident[wanted].sum())
            for number in wanted[~resident[wanted]]:
                if resident.sum() == num_slots:
                    may_go = resident.copy()
                    may_go[wanted] = False
                    resident[lowest(policy.scores(now), may_go)] = False
                resident[number] = True
    return found


def test_a_cache_smaller_than_what_a_pass_needs_keeps_what_it_can():
    chance = random.Random(0)
    passes = [[chance.sample(range(NUM_EXPERTS), 3) for _ in range(NUM_LAYERS)] for _ in range(300)]  # 9 experts each
    uses = [int(it) for needed in passes for layer, experts in enumerate(needed) for it in numbers(layer, experts)]
    assert hits(LRU(TOTAL), passes, 6) == 0
    found = hits(NextUse(NUM_LAYERS, NUM_EXPERTS), passes, 6)
    assert 0.7 * hits(Belady(TOTAL, uses), passes, 6) < found < hits(Belady(TOTAL, uses), passes, 6)


def test_it_learns_whether_tokens_stay_with_their_experts():
    chance = random.Random(1)
    switching, passes = [0, 1, 2], []
    for _ in range(400):  # the next pass never needs the experts of this one
        switching = [chance.choice([e for e in range(NUM_EXPERTS) if e != last]) for last in switching]
        passes.append([[expert] for expert in switching])
    learnt = NextUse(NUM_LAYERS, NUM_EXPERTS)
    hits(learnt, passes, 6)
    used, unused = learnt.scores_behind(len(passes))
    assert (used < unused).all()
