"""Experts with norms of their own, by Triton's interpreter against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeflow.kernels.norm import ExpertNorms, NormWeights, PostNorms, add_normalised, normalise
from moeflow.kernels.normed_experts import expert_inputs, normed_experts
from moeflow.kernels.triton import experts, matrix_products
from moeflow.kernels.triton import normed_experts as triton_normed
from tests.kernels.triton.launches import triton_alone
from tests.kernels.triton.tolerance import tolerance

NUM_EXPERTS, NUM_SHARED, TOP_K, HIDDEN, WIDTH, EPS = 5, 2, 2, 72, 40, 1e-5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
FORMS = {"pair_kernel": 1, "expert_kernel": 5, "tile_kernel": 9}  # with so many tokens
PLAIN = NormWeights(torch.ones(HIDDEN), EPS)


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_MOST_SCANNED", 32)


def norms_of(dtype: torch.dtype, *, has_scale: bool = True) -> PostNorms:
    attention, feed_forward, shared, chosen = (NormWeights(random(HIDDEN).to(dtype), EPS) for _ in range(4))
    own = ExpertNorms(*(random(HIDDEN).to(dtype), 0.25), *(random(HIDDEN).to(dtype) for _ in range(2)), shared, chosen)
    return PostNorms(attention, feed_forward, own, random(1).to(dtype) if has_scale else None)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape) / 2 + 1


def wide(x: Any) -> Any:
    """Return the same in float64."""
    if isinstance(x, NormWeights):
        return NormWeights(x.weight.double(), x.eps)
    if isinstance(x, tuple):
        return type(x)(*map(wide, x))
    return x.double() if isinstance(x, torch.Tensor) else x


@DTYPES
def test_inputs_are_those_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, hidden, norms = torch.randn(3, HIDDEN).to(dtype), torch.randn(3, HIDDEN).to(dtype), norms_of(dtype)
    with triton_alone(triton_normed) as started:
        out, inputs = expert_inputs(x, hidden, PLAIN, norms)
    assert len(started) == 1
    given = wide(norms)
    wanted = add_normalised(hidden.double(), x.double(), given.attention)
    torch.testing.assert_close(out.double(), wanted, **tolerance(dtype))
    normed, own = normalise(wanted, wide(PLAIN)), given.experts
    for got, weights in zip(
        inputs, (own.chosen_weights, own.shared_weights, own.router_weights * own.router_scale), strict=True
    ):
        torch.testing.assert_close(got.double(), normed * weights, **tolerance(dtype))


@DTYPES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_scale", [True, False])
def test_sums_of_each_kind_are_normalised(has_scale: bool, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    num_tokens, num_all = FORMS[form], NUM_EXPERTS + NUM_SHARED
    inputs, hidden = torch.randn(2, num_tokens, HIDDEN).to(dtype), torch.randn(num_tokens, HIDDEN).to(dtype)
    gate_up = (torch.randn(num_all, 2 * WIDTH, HIDDEN) / HIDDEN**0.5).to(dtype)
    down = (torch.randn(num_all, HIDDEN, WIDTH) / WIDTH**0.5).to(dtype)
    topk_ids = torch.stack([torch.randperm(NUM_EXPERTS)[:TOP_K] for _ in range(num_tokens)])
    topk_ids = torch.cat([topk_ids, torch.arange(NUM_EXPERTS, num_all).expand(num_tokens, -1)], dim=1)
    topk_weights = torch.cat([torch.rand(num_tokens, TOP_K) + 0.5, torch.ones(num_tokens, NUM_SHARED)], dim=1)
    norms, next_norm = norms_of(dtype, has_scale=has_scale), NormWeights(random(HIDDEN).to(dtype), EPS)
    with triton_alone(triton_normed, experts, matrix_products) as started:
        out, normed = normed_experts(
            inputs,
            (gate_up, down),
            (topk_ids, topk_weights),
            NUM_SHARED,
            hidden,
            norms,
            function="gelu_tanh",
            next_norm=next_norm,
        )
    names = [kernel.fn.__name__ for kernel in started]
    assert [name for name in names if name != "sort_kernel"] == [form, form, "expert_norms_kernel"]

    given, sums = wide(norms), torch.zeros(2, num_tokens, HIDDEN, dtype=torch.float64)
    for token in range(num_tokens):
        for expert, weight in zip(topk_ids[token].tolist(), topk_weights[token].double(), strict=True):
            kind = int(expert >= NUM_EXPERTS)
            gate, up = (gate_up[expert].double() @ inputs[kind, token].double()).chunk(2)
            units = torch.nn.functional.gelu(gate, approximate="tanh") * up
            sums[kind, token] += weight * (down[expert].double() @ units)
    total = normalise(sums[1], given.experts.shared) + normalise(sums[0], given.experts.chosen)
    wanted = add_normalised(hidden.double(), total, given.feed_forward, given.scale)
    limits = {name: 2 * size for name, size in tolerance(dtype).items()}  # of three norms, one behind the other
    torch.testing.assert_close(out.double(), wanted, **limits)
    torch.testing.assert_close(normed.double(), normalise(wanted, wide(next_norm)), **limits)
