"""The least that a pass costs, against sums done by hand."""

from __future__ import annotations

import dataclasses
import random

import pytest

from moeflow.bench.floors import distinct_experts
from tests.bench.example_costs import SHAPE, cost

ATTENTION = 8 * 8 + 2 * (8 * 4) + 8 * 8  # q, k and v, output
EXPERT = 3 * 8 * 16
ROUTER = 8 * 4
HEAD = 100 * 8


def test_embeddings_may_be_kept_in_another_format():
    assert cost(embedding_bits=8).num_bytes == cost().num_bytes - HEAD
    assert cost(embedding_bits=8, num_sampled=0).num_bytes == cost(num_sampled=0).num_bytes


def test_one_token_reads_each_active_weight_once():
    one = cost()
    kv = 10 * 48
    assert one.num_bytes == pytest.approx(2 * (3 * (ATTENTION + ROUTER + 2 * EXPERT) + HEAD) + kv)
    flops = 2 * (3 * (ATTENTION + ROUTER + 2 * EXPERT) + HEAD) + 4 * 3 * 2 * 4 * 10
    assert one.num_flops == pytest.approx(flops)


def test_one_token_reads_the_models_active_parameters():
    assert cost(weight_bits=8, num_seen=0).num_bytes == pytest.approx(SHAPE.num_active_parameters)


def test_a_huge_batch_reads_all_weights_but_the_table():
    shape_bytes = cost(weight_bits=8, num_tokens=500, num_seen=0).num_bytes
    assert shape_bytes == pytest.approx(SHAPE.num_parameters - HEAD)


def test_bits_count_only_where_they_are():
    assert cost(weight_bits=8.5, num_seen=0).num_bytes == pytest.approx(cost(num_seen=0).num_bytes * 8.5 / 16)


def test_a_prefill_needs_logits_of_its_last_token_only():
    many = cost(num_tokens=64, num_sampled=1, num_seen=0)
    assert many.num_flops == pytest.approx(2 * (64 * 3 * (ATTENTION + ROUTER + 2 * EXPERT) + HEAD))
    assert cost(num_sampled=0).num_flops == pytest.approx(cost().num_flops - 2 * HEAD)


def test_dense_models_and_dense_layers():
    dense = dataclasses.replace(SHAPE, num_experts=0, top_k=0)
    assert cost(dense, weight_bits=8, num_seen=0).num_bytes == pytest.approx(3 * (ATTENTION + EXPERT) + HEAD)
    mixed = dataclasses.replace(SHAPE, dense_layers=(1,), dense_intermediate_size=32)
    expected = 3 * ATTENTION + 2 * (ROUTER + 2 * EXPERT) + 3 * 8 * 32 + HEAD
    assert cost(mixed, weight_bits=8, num_seen=0).num_bytes == pytest.approx(expected)
    assert cost(mixed, weight_bits=8, num_seen=0).num_bytes == pytest.approx(mixed.num_active_parameters)


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_distinct_experts_are_those_of_even_routers(num_tokens):
    rng = random.Random(1)
    trials = [len({e for _ in range(num_tokens) for e in rng.sample(range(16), 4)}) for _ in range(4000)]
    assert distinct_experts(16, 4, num_tokens) == pytest.approx(sum(trials) / len(trials), rel=0.01)
    assert distinct_experts(0, 0, num_tokens) == 0.0
