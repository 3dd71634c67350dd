"""How many experts must have a place in memory, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.planner.choices.expert_plan import min_expert_share, min_slots
from moeflow.planner.costs.model_costs import ModelCosts
from tests.planner.examples import HALF, SMALL


@pytest.mark.parametrize(("top_k", "slots"), [(1, 4), (2, 4), (3, 6), (8, 16)])
def test_a_token_needs_its_experts_and_the_next_layers(top_k, slots):
    assert min_slots(dataclasses.replace(SMALL, top_k=top_k)) == slots


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "share"), [(4, 8, 4 / 32), (1, 5, 4 / 5), (1, 4, 1.0), (1, 2, 1.0), (4, 0, 0.0)]
)
def test_the_share_without_which_no_pass_is_computed(num_layers, num_experts, share):
    top_k = min(2, num_experts)
    shape = dataclasses.replace(SMALL, num_layers=num_layers, num_experts=num_experts, top_k=top_k)
    assert min_expert_share(ModelCosts(shape, HALF)) == share
