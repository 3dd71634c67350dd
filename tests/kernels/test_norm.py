import math

import pytest
import torch

from moeflow.kernels.cpu import row_ops
from moeflow.kernels.norm import NormWeights, add_normalised, layer_norm, normalise, rms_norm


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def _by(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(row_ops, "_AVAILABLE", False)


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7), (2, 5, 16)])
def test_each_vector_is_divided_by_its_root_mean_square(shape):
    x = torch.randn(shape) * 3
    weight = torch.randn(shape[-1])
    got = rms_norm(x, weight, 1e-5)
    for vector, result in zip(x.reshape(-1, shape[-1]).tolist(), got.reshape(-1, shape[-1]).tolist(), strict=True):
        root = math.sqrt(sum(value * value for value in vector) / len(vector) + 1e-5)
        want = [value / root * scale for value, scale in zip(vector, weight.tolist(), strict=True)]
        assert result == pytest.approx(want, abs=1e-5)


def test_bfloat16_is_averaged_in_float32():
    x = torch.full((1, 4096), 1.001).to(torch.bfloat16)
    x[0, 0] = 60.0  # a sum kept in bfloat16 would stop growing beside this
    want = x.float() / x.float().pow(2).mean().sqrt()
    got = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 0.0)
    torch.testing.assert_close(got.float(), want, rtol=0.01, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7), (2, 5, 16)])
def test_a_layer_norm_is_that_of_the_definition(shape, dtype):
    x, weight, bias = (torch.randn(size).to(dtype) for size in (shape, shape[-1:], shape[-1:]))
    wide = x.double()
    variance = (wide - wide.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
    want = (wide - wide.mean(-1, keepdim=True)) / (variance + 1e-3).sqrt() * weight.double()
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for given, more in ((None, 0.0), (bias, bias.double())):
        got = layer_norm(x, weight, given, 1e-3)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want + more, **tolerance)
        assert torch.equal(normalise(x, NormWeights(weight, 1e-3, True, given)), got)


@pytest.mark.parametrize("subtracts_mean", [False, True])
def test_hidden_states_are_added_and_scaled_with_the_bits_of_each_step(subtracts_mean):
    hidden, x, norm = torch.randn(3, 16), torch.randn(3, 16), NormWeights(torch.randn(16), 1e-5, subtracts_mean)
    assert torch.equal(add_normalised(hidden, x, norm), hidden + normalise(x, norm))
    factor = torch.tensor([0.7])
    assert torch.equal(add_normalised(hidden, x, norm, factor), (hidden + normalise(x, norm)) * factor)
