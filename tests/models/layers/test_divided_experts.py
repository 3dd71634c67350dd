"""Experts shared by two processors: wherever the border is, the results are those of one."""

from __future__ import annotations

import pytest
import torch

from moeflow.kernels.activation import ClampedSwiglu
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import ExpertKind, PackedExperts
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.experts import expert_pairs, fused_experts
from moeflow.models.layers.divided_experts import RoutedTokens, experts_below, experts_from
from moeflow.models.layers.expert_weights import ExpertSlabs, slab_bytes

EXPERTS, TOP_K, HIDDEN, WIDTH = 5, 3, 64, 48
CLAMPED = ClampedSwiglu(alpha=1.7, limit=1.0)


def routed(num_tokens: int, *, seed: int = 0) -> tuple[RoutedTokens, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous()
    rows = (torch.randn(num_tokens, HIDDEN, generator=generator) for _ in range(2))
    hidden, residual = rows
    return RoutedTokens(hidden, ids, torch.rand(num_tokens, TOP_K, generator=generator)), residual


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) / 8,
        torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) / 8,
    )


def biases() -> ExpertBiases:
    generator = torch.Generator().manual_seed(2)
    return ExpertBiases(*(torch.randn(EXPERTS, size, generator=generator) for size in (2 * WIDTH, HIDDEN)))


def shared(
    border: int, experts: PackedExperts | ExpertSlabs, routed: RoutedTokens, residual: torch.Tensor
) -> torch.Tensor:
    """Compute as pipelines do: below the border for tokens that chose any of those."""
    rows = (routed.topk_ids < border).any(dim=1).nonzero().flatten()
    below = experts_below(border, experts, routed.rows(rows))
    return experts_from(border, experts, routed, (rows, below), residual)


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_packed_experts_give_the_same_bits(weight_format, num_tokens):
    packed = PackedExperts.pack(*weights(), weight_format, function=CLAMPED, biases=biases())
    given, residual = routed(num_tokens)
    expected = packed.compute(given.hidden, given.topk_ids, given.topk_weights, residual)
    for border in range(EXPERTS + 1):
        assert torch.equal(shared(border, packed, given, residual), expected)


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_slabs_give_the_same_but_for_rounding(num_tokens):
    gate_up, down = weights()
    size = slab_bytes(HIDDEN, WIDTH, torch.float32)
    storage = torch.zeros(EXPERTS, size, dtype=torch.uint8)
    slabs = ExpertSlabs(HIDDEN, WIDTH, torch.float32, storage, ExpertKind(CLAMPED), biases())
    for mine, theirs in ((slabs.gate_up, gate_up), (slabs.down, down)):
        for part, source in zip(mine, theirs, strict=True):
            part.copy_(source)
    given, residual = routed(num_tokens)
    chosen = (given.topk_ids, given.topk_weights)
    expected = fused_experts(given.hidden, gate_up, down, *chosen, function=CLAMPED, biases=biases()) + residual
    for border in range(EXPERTS + 1):
        torch.testing.assert_close(shared(border, slabs, given, residual), expected)


def test_pairs_of_other_experts_are_zero():
    given, _ = routed(20)
    pairs = expert_pairs(given.hidden, *weights(), given.topk_ids, given.topk_weights, range(1, 3))
    is_some = (given.topk_ids >= 1) & (given.topk_ids < 3)
    assert pairs[is_some].any(dim=1).all()
    assert not pairs[~is_some].any()
    whole = expert_pairs(given.hidden, *weights(), given.topk_ids, given.topk_weights, range(EXPERTS))
    torch.testing.assert_close(pairs[is_some], whole[is_some])
