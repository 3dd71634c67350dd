import math

import pytest
import torch
from torch.nn import functional as F

from moeflow.kernels.activation import NONLINEARITIES
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.experts import ExpertsInSlots, fused_experts

NUM_EXPERTS, HIDDEN, WIDTH = 6, 16, 10


def _weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) / 4
    down = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, generator=generator) / 3
    return gate_up.to(dtype), down.to(dtype)


def _inputs(num_tokens, top_k, *, skew=0.0, dtype=torch.float32):
    """Random rows, choices and weights; with `skew` 1 every token chooses the same experts."""
    generator = torch.Generator().manual_seed(num_tokens * 10 + top_k)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator) * (1 - skew) + torch.arange(NUM_EXPERTS) * skew
    topk_ids = scores.topk(top_k, dim=-1).indices
    return x, topk_ids, torch.rand(num_tokens, top_k, generator=generator)


def _one_token(x, ids, weights, gate_up, down):
    """Return one token's result in float64, expert by expert."""
    out = torch.zeros(HIDDEN, dtype=torch.float64)
    for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        gate, up = (gate_up[expert].double() @ x.double()).chunk(2)
        out += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out


FUNCTIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("function", NONLINEARITIES)
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_other_functions_two_matrices_and_biases(function, is_gated, has_bias):
    gate_up, down = _weights()
    gate_up = gate_up if is_gated else gate_up[:, :WIDTH]
    sizes = (gate_up.shape[1], HIDDEN)
    biases = ExpertBiases(*(torch.randn(NUM_EXPERTS, size) for size in sizes)) if has_bias else None
    for num_tokens in (1, 9):
        x, topk_ids, topk_weights = _inputs(num_tokens, 2)
        got = fused_experts(x, gate_up, down, topk_ids, topk_weights, function=function, biases=biases)
        for token in range(num_tokens):
            want = torch.zeros(HIDDEN, dtype=torch.float64)
            for expert, weight in zip(topk_ids[token].tolist(), topk_weights[token].tolist(), strict=True):
                units = gate_up[expert].double() @ x[token].double()
                units = units + biases[0][expert] if biases else units
                results = torch.tensor([FUNCTIONS[function](v) for v in units[:WIDTH].tolist()], dtype=torch.float64)
                results = results * units[WIDTH:] if is_gated else results
                want += weight * (down[expert].double() @ results + (biases[1][expert] if biases else 0))
            torch.testing.assert_close(got[token].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("skew", [0.0, 1.0])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (1, 2), (1, 6), (2, 2), (7, 3), (40, 2)])
def test_every_token_gets_the_weighted_sum_of_its_experts(num_tokens, top_k, skew):
    x, topk_ids, topk_weights = _inputs(num_tokens, top_k, skew=skew)
    gate_up, down = _weights()
    got = fused_experts(x, gate_up, down, topk_ids, topk_weights)
    for token in range(num_tokens):
        want = _one_token(x[token], topk_ids[token], topk_weights[token], gate_up, down)
        torch.testing.assert_close(got[token].double(), want, atol=1e-5, rtol=1e-5)


def test_a_pass_without_tokens_gives_none():
    x, topk_ids, topk_weights = _inputs(0, 2)
    assert fused_experts(x, *_weights(), topk_ids, topk_weights).shape == (0, HIDDEN)


def test_a_token_does_not_depend_on_those_beside_it():
    x, topk_ids, topk_weights = _inputs(33, 2)
    together = fused_experts(x, *_weights(), topk_ids, topk_weights)
    for rows in (slice(0, 1), slice(5, 7), slice(10, 33)):
        alone = fused_experts(x[rows], *_weights(), topk_ids[rows], topk_weights[rows])
        torch.testing.assert_close(together[rows], alone, atol=1e-6, rtol=1e-6)


def test_the_sum_does_not_depend_on_the_order_of_tokens():
    x, topk_ids, topk_weights = _inputs(16, 3)
    shuffle = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    straight = fused_experts(x, *_weights(), topk_ids, topk_weights)
    shuffled = fused_experts(x[shuffle], *_weights(), topk_ids[shuffle], topk_weights[shuffle])
    torch.testing.assert_close(shuffled, straight[shuffle], atol=1e-6, rtol=1e-6)


def test_bfloat16_is_close_to_the_exact_result():
    x, topk_ids, topk_weights = _inputs(9, 2, dtype=torch.bfloat16)
    gate_up, down = _weights(torch.bfloat16)
    got = fused_experts(x, gate_up, down, topk_ids, topk_weights)
    assert got.dtype == torch.bfloat16
    for token in range(9):
        want = _one_token(x[token], topk_ids[token], topk_weights[token], gate_up, down)
        torch.testing.assert_close(got[token].double(), want, atol=0.05, rtol=0.05)


def test_bfloat16_results_are_weighted_and_added_in_float32():
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    x[0, 0] = 1
    gate_up = torch.zeros(NUM_EXPERTS, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16)
    gate_up[:, 0, 0], gate_up[:, WIDTH, 0] = 32, 1 / 32  # silu(32) is 32, so every expert returns 1
    down = torch.ones(NUM_EXPERTS, HIDDEN, WIDTH, dtype=torch.bfloat16)
    weights = torch.full((1, 6), 1.0039)  # bfloat16 would make it 1
    got = fused_experts(x, gate_up, down, torch.arange(6).unsqueeze(0), weights)
    assert (got == torch.tensor(6 * 1.0039).to(torch.bfloat16)).all()
    assert (got != 6).all()


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_experts_without_slots_add_nothing(num_tokens):
    gate_up, down = _weights()
    slots = torch.tensor([2, -1, 0, 3, -1, 1], dtype=torch.int32)
    used = [expert for expert in range(NUM_EXPERTS) if slots[expert] >= 0]
    places = slots[used].long()
    moved = (torch.full((4, *each.shape[1:]), torch.nan) for each in (gate_up, down))
    moved_up, moved_down = (
        new.index_copy(0, places, each[used]) for new, each in zip(moved, (gate_up, down), strict=True)
    )
    biases = ExpertBiases(torch.randn(NUM_EXPERTS, 2 * WIDTH), torch.randn(NUM_EXPERTS, HIDDEN))
    x, topk_ids, topk_weights = _inputs(num_tokens, 3)
    before = torch.randn(num_tokens, HIDDEN)
    got = ExpertsInSlots(moved_up, moved_down, slots, "relu", biases).sums(x, topk_ids, topk_weights, before)
    has_slot = (slots >= 0)[topk_ids]
    expected = before + fused_experts(
        x, gate_up, down, topk_ids, topk_weights * has_slot, function="relu", biases=biases
    )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
