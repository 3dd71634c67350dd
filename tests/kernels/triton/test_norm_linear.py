"""A norm and the product behind it by Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from moeflow.kernels.linear import norm_linear
from moeflow.kernels.norm import NormWeights
from moeflow.kernels.triton import norm
from moeflow.kernels.triton import norm_linear as triton_norm_linear
from tests.kernels.triton.launches import triton_alone
from tests.kernels.triton.tolerance import tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size", "num_outputs"), [(1, 128, 64), (3, 200, 50), (20, 64, 33)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_normalised_rows(
    has_bias: bool, num_rows: int, size: int, num_outputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    x = torch.randn(num_rows, size + 7).to(dtype)[:, 7:]
    weights = NormWeights((torch.randn(size) / 4 + 1).to(dtype), 1e-5)
    weight, bias = (torch.randn(num_outputs, size) / size**0.5).to(dtype), torch.randn(num_outputs).to(dtype)
    with triton_alone(triton_norm_linear) as started:
        found = norm_linear(x, weights, weight, bias if has_bias else None)
    assert len(started) == 1
    wide = x.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights.weight.double()
    wanted = normed @ weight.double().T + (bias.double() if has_bias else 0)
    limits = {name: 2 * most for name, most in tolerance(dtype).items()}
    torch.testing.assert_close(found.double(), wanted, **limits)


def test_long_rows_and_many_are_normalised_first() -> None:
    for shape in ((65, 64), (1, 4096)):
        x, weight = torch.randn(shape), torch.randn(3, shape[1])
        with triton_alone(triton_norm_linear, norm) as started:
            norm_linear(x, NormWeights(torch.ones(shape[1]), 1e-5), weight)
        assert [kernel.fn.__name__ for kernel in started] == ["norm_kernel"]
