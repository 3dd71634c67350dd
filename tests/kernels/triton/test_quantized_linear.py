"""Products with planar matrices against float64, and through the public function."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from moeflow.kernels.linear import linear
from moeflow.kernels.triton import launching, quantized_linear
from moeflow.kernels.triton.planar_blocks import from_blocks
from moeflow.kernels.triton.planar_weights import MadeFormat, pack
from moeflow.kernels.weight_format import BlockKind
from tests.kernels.blocks import random_blocks
from tests.kernels.triton.test_planar_weights import KINDS
from tests.kernels.triton.tolerance import tolerance
from tests.marks import thorough_unless

SIZE, OUTPUTS = 96, 70


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(math.nan))


@pytest.mark.parametrize("num_tokens", [1, 3, 12, 70])
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_product(dtype: torch.dtype, weight_format: MadeFormat, num_tokens: int) -> None:
    weight = pack(torch.randn(1, OUTPUTS, SIZE) / SIZE**0.5, weight_format)
    x, bias, residual = (
        torch.randn(shape).to(dtype) for shape in ((num_tokens, SIZE), (OUTPUTS,), (num_tokens, OUTPUTS))
    )
    plain = x.double() @ weight[0].double().T
    for got, expected in (
        (quantized_linear.quantized_linear(x, weight), plain),
        (quantized_linear.quantized_linear(x, weight, bias, residual), plain + bias.double() + residual.double()),
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, **tolerance(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "num_tokens"),
    thorough_unless(
        lambda dtype, num_tokens: (dtype == torch.float32) == (num_tokens == 1),
        itertools.product((torch.float32, torch.bfloat16), (1, 12)),
    ),
)
def test_blocks_of_files(dtype: torch.dtype, kind: BlockKind, num_tokens: int) -> None:
    weight = from_blocks(random_blocks(kind, OUTPUTS, 512, largest_scale=1 / 64).unsqueeze(0), kind)
    assert weight is not None
    x = (torch.randn(num_tokens, 512) / 512**0.5).to(dtype)
    expected = x.double() @ weight[0].double().T
    size = expected.abs().max()
    got = quantized_linear.quantized_linear(x, weight).double()
    torch.testing.assert_close(got / size, expected / size, **tolerance(dtype))


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_weights_are_not_rounded_to_the_inputs_type(dtype: torch.dtype, num_tokens: int) -> None:
    x = torch.randn(num_tokens, SIZE).to(dtype)
    weight, bias = torch.randn(OUTPUTS, SIZE), torch.randn(OUTPUTS)
    plain = x.double() @ weight.double().T
    for got, expected in (
        (quantized_linear.wide_linear(x, weight), plain),
        (quantized_linear.wide_linear(x, weight, bias), plain + bias.double()),
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, **tolerance(torch.float32))


def test_the_public_function_converts_many_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, real, sizes = torch.randn(OUTPUTS, SIZE), quantized_linear.wide_linear, []

    def noted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(len(x))
        return real(x, *others)

    monkeypatch.setattr(quantized_linear, "wide_linear", noted)
    monkeypatch.setattr(launching, "accepts", lambda x: True)
    for num_tokens in (16, 17):
        x = torch.randn(num_tokens, SIZE).bfloat16()
        torch.testing.assert_close(
            linear(x, weight).double(), x.double() @ weight.double().T, **tolerance(torch.float32)
        )
    assert sizes == [16]


@pytest.mark.parametrize(("num_tokens", "rows"), [(3, 1), (12, 6)])
def test_a_row_does_not_depend_on_others(num_tokens: int, rows: int) -> None:
    weight, x = pack(torch.randn(1, OUTPUTS, SIZE), "int4"), torch.randn(num_tokens, SIZE)
    together = quantized_linear.quantized_linear(x, weight)
    assert torch.equal(quantized_linear.quantized_linear(x[rows : 2 * rows], weight), together[rows : 2 * rows])


@pytest.mark.parametrize("num_tokens", [1, 12])
def test_the_public_function_uses_it(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = pack(torch.randn(1, OUTPUTS, SIZE), "int4"), torch.randn(num_tokens, SIZE)
    bias, residual = torch.randn(OUTPUTS), torch.randn(num_tokens, OUTPUTS)
    expected = linear(x, weight, bias, residual)
    calls: list[Any] = []

    def recorded(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return kernel(*arguments)

    kernel = quantized_linear.quantized_linear
    monkeypatch.setattr(quantized_linear, "quantized_linear", recorded)
    monkeypatch.setattr(launching, "accepts", lambda x: True)
    torch.testing.assert_close(linear(x, weight, bias, residual), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1
