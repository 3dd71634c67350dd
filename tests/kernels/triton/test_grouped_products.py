"""Experts of long passes by torch's grouped products, against float64. Triton's interpreter runs the other kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moeflow.kernels.activation import Activation, ClampedSwiglu
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.triton import experts, grouped_products, launching, matrix_products
from tests.kernels.triton.test_experts import HIDDEN, NUM_EXPERTS, WIDTH, Given, check, given, weighted_pairs

DTYPE = torch.bfloat16
CHOICES = {"all": None, "some are empty": [1, 4], "the first and last are empty": [2, 3], "one gets most": [5, 5]}


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let all passes be long ones, and count the grouped products; new memory holds NaN or an id out of range."""
    empty, grouped_mm = torch.empty, torch.nn.functional.grouped_mm
    rows: list[int] = []

    def poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        x = empty(*arguments, **options)
        return x.fill_(math.nan if x.is_floating_point() else 2**30)

    def counted(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        rows.append(len(x))
        return grouped_mm(x, *arguments, **options)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    monkeypatch.setattr(experts, "_MOST_SCANNED", 0)
    monkeypatch.setattr(launching, "accepts", lambda x: True)
    return rows


@pytest.mark.parametrize("chosen", CHOICES)
def test_results_are_the_definition(chosen: str, started: list[int]) -> None:
    layer = given(9, DTYPE)
    if (ids := CHOICES[chosen]) is not None:
        layer.ids[:] = torch.tensor(ids)
    residual = torch.randn(layer.x.shape).to(DTYPE)
    got = experts.fused_experts(*layer, residual=residual)
    check(got, weighted_pairs(layer).sum(dim=1) + residual.double(), DTYPE)
    assert started == [18, 18]


@pytest.mark.parametrize("function", ["gelu_tanh", ClampedSwiglu(alpha=1.7, limit=0.5)])
def test_functions(function: Activation, started: list[int]) -> None:
    layer = given(5, DTYPE)
    check(experts.fused_experts(*layer, function=function), weighted_pairs(layer, function).sum(dim=1), DTYPE)
    assert started


def test_experts_without_a_gate(started: list[int]) -> None:
    layer = given(5, DTYPE, is_gated=False)
    check(experts.fused_experts(*layer, function="relu"), weighted_pairs(layer, "relu").sum(dim=1), DTYPE)
    assert started


def test_rows_without_experts_keep_the_residual(started: list[int]) -> None:
    layer, without = given(7, DTYPE), [0, 4, 6]
    layer.ids[without] = -1
    layer.x[without] = math.nan
    residual = torch.randn(layer.x.shape).to(DTYPE)
    got = experts.fused_experts(*layer, residual=residual)
    check(got, weighted_pairs(layer).sum(dim=1) + residual.double(), DTYPE)
    assert torch.equal(got[without], residual[without])
    assert started


def _other(name: str) -> tuple[Given, dict[str, Any]]:
    """Return a layer for the tiles, and options."""
    match name:
        case "float16":
            return given(3, torch.float16), {}
        case "slots":
            return given(3, DTYPE), {"slots": torch.arange(NUM_EXPERTS, dtype=torch.int32)}
        case "biases":
            return given(3, DTYPE), {
                "biases": ExpertBiases(
                    torch.zeros(NUM_EXPERTS, 2 * WIDTH, dtype=DTYPE), torch.zeros(NUM_EXPERTS, HIDDEN, dtype=DTYPE)
                )
            }
        case "apart":
            layer = given(3, DTYPE)
            wide = torch.zeros(NUM_EXPERTS, 2 * WIDTH + 1, HIDDEN, dtype=DTYPE)
            wide[:, 1:] = layer.gate_up
            return layer._replace(gate_up=wide[:, 1:]), {}
        case "odd columns":
            return given(3, DTYPE, width=36), {}
        case _:
            return given(3, DTYPE, width=24), {}


@pytest.mark.parametrize("name", ["float16", "slots", "biases", "apart", "odd columns", "narrow experts"])
def test_others_are_left_to_the_tiles(name: str, started: list[int]) -> None:
    layer, more = _other(name)
    check(experts.fused_experts(*layer, **more), weighted_pairs(layer).sum(dim=1), layer.x.dtype)
    assert not started


@pytest.mark.parametrize("capability", [75, 80, 89, 100, 120])
def test_other_gpus_use_the_tiles(capability: int, monkeypatch: pytest.MonkeyPatch, started: list[int]) -> None:
    layer = given(2, DTYPE)
    pairs = matrix_products.Pairs(layer.ids, NUM_EXPERTS, range(NUM_EXPERTS))
    assert grouped_products.computes(*layer[:3], pairs, has_biases=False)
    monkeypatch.setattr(grouped_products, "gpu_of", lambda x: launching.GPU(capability, 132))
    assert not grouped_products.computes(*layer[:3], pairs, has_biases=False)
    assert not started


def test_part_of_the_experts_uses_the_tiles(started: list[int]) -> None:
    layer = given(3, DTYPE)
    some = range(2, 5)
    absent = tuple(expert for expert in range(NUM_EXPERTS) if expert not in some)
    check(experts.expert_pairs(*layer, some), weighted_pairs(layer, absent=absent), DTYPE)
    assert not started
