"""Passes are cut where that makes them shorter, and not where it would only read weights more often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.parallel_config import MicroBatchCosts
from moeflow.planner.costs.micro_batches import HAND_OVER_S, micro_batch_costs, num_micro_batches, pass_s
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from tests.shapes import MIXTRAL

COSTS = micro_batch_costs(ModelCosts(MIXTRAL, Formats(matrices="int8", embeddings="int8", kv="float32")))
READING = MicroBatchCosts(fixed_s=1.0, expert_s=0.0, num_experts=0, top_k=0, token_s=0.0)
COMPUTING = MicroBatchCosts(fixed_s=0.0, expert_s=0.0, num_experts=0, top_k=0, token_s=1.0)


@given(st.integers(1, 600), st.integers(2, 8))
def test_a_pass_that_only_reads_is_never_cut(num_tokens, num_stages):
    assert num_micro_batches(num_tokens, num_stages, READING) == 1


def test_a_pass_that_only_computes_keeps_all_stages_busy():
    """Of M micro-batches through S stages, each stage is idle for S - 1 turns of M + S - 1."""
    number = num_micro_batches(512, 4, COMPUTING)
    assert number == 16
    assert pass_s(number, 512, 4, COMPUTING) == pytest.approx((16 + 3) * (512 / 16 / 4 + HAND_OVER_S))
    assert pass_s(1, 512, 4, COMPUTING) == pytest.approx(512 + 4 * HAND_OVER_S)


def test_prompts_are_cut_and_few_decodes_are_not():
    assert num_micro_batches(1, 2, COSTS) == 1
    assert num_micro_batches(16, 2, COSTS) == 1
    assert num_micro_batches(512, 2, COSTS) > 1
    numbers = [num_micro_batches(tokens, 3, COSTS) for tokens in (64, 256, 1024, 4096)]
    assert numbers == sorted(numbers)


@given(st.integers(1, 5), st.integers(2, 8))
def test_there_is_a_token_in_each(num_tokens, num_stages):
    assert 1 <= num_micro_batches(num_tokens, num_stages, COMPUTING) <= num_tokens


def test_one_stage_has_nobody_to_overlap_with():
    assert num_micro_batches(512, 1, COSTS) == 1
