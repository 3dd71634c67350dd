"""Experts take the first choices of a pass, up to their capacity: against a loop over tokens in order of arrival."""

from fractions import Fraction
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kernels import capacity as capacity_module
from moeflow.kernels.capacity import ExpertCapacity
from moeflow.kernels.cpu import extension, row_ops

needs_extension = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@st.composite
def passes(draw):
    """Return experts, each token's different choices, and a factor."""
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, num_experts))
    num_tokens = draw(st.integers(1, 24))
    skewed = draw(st.booleans())  # most tokens then choose the first experts
    order = list(range(num_experts))
    tokens = [order[:top_k] if skewed and t % 3 else draw(st.permutations(order))[:top_k] for t in range(num_tokens)]
    return num_experts, tokens, draw(st.integers(1, 40)) / 8


def brute_force(num_experts, tokens, factor):
    """Return whether each choice is kept, by the formula in whole numbers and one token after another."""
    top_k = len(tokens[0])
    most = max(ceil(top_k * Fraction(factor) * len(tokens) / num_experts), 1)
    taken = [0] * num_experts
    kept = []
    for chosen in tokens:
        row = []
        for expert in chosen:
            row.append(taken[expert] < most)
            taken[expert] += 1
        kept.append(row)
    return kept


@pytest.mark.parametrize("computes", [pytest.param("kernel", marks=needs_extension), "torch"])
def test_the_first_choices_are_kept(monkeypatch, computes):
    if computes == "torch":
        monkeypatch.setattr(capacity_module.row_ops, "accepts", lambda x: False)

    @settings(max_examples=80, deadline=None)
    @given(passes())
    def check(case):
        num_experts, tokens, factor = case
        capacity = ExpertCapacity(factor)
        ids = torch.tensor(tokens)
        weights = torch.rand(ids.shape) + 0.5
        found = capacity.limit(ids, weights.clone(), num_experts)
        kept = torch.tensor(brute_force(*case))
        assert torch.equal(found, torch.where(kept, weights, 0))
        assert (capacity.num_choices, capacity.num_dropped) == (ids.numel(), int((~kept).sum()))

    check()


def test_counts_add_up():
    capacity = ExpertCapacity(1.0)
    for _ in range(2):
        capacity.limit(torch.tensor([[0], [0], [0], [1]]), torch.ones(4, 1), 2)
    assert (capacity.num_choices, capacity.num_dropped) == (8, 2)


@needs_extension
def test_ids_that_are_no_experts_are_refused():
    with pytest.raises(IndexError):
        row_ops.limit_choices(ExpertCapacity(1.0).handle, torch.tensor([[2]]), torch.ones(1, 1), 2)
