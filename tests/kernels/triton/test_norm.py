"""The norm kernel against the torch reference."""

import pytest
import torch

from moeflow.kernels.norm import NormWeights, add_normalised, add_normalised_norm, normalise
from moeflow.kernels.triton import norm
from tests.kernels.triton.launches import triton_alone
from tests.kernels.triton.tolerance import tolerance

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (2, 2, 33)])
def test_rms_norm_is_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5).double(), expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_is_the_reference(has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((5, 48), (48,), (48,)))
    given = bias if has_bias else None
    wide_bias = bias.double() if has_bias else None
    expected = torch.nn.functional.layer_norm(x.double(), (48,), weight.double(), wide_bias, 1e-5)
    torch.testing.assert_close(norm.layer_norm(x, weight, given, 1e-5).double(), expected, **tolerance(dtype))


def test_rows_may_be_parts_of_longer_rows() -> None:
    x, weight = torch.randn(4, 96)[:, :64], torch.randn(64)
    expected = norm.rms_norm(x.contiguous(), weight, 1e-6)
    assert torch.equal(norm.rms_norm(x, weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("subtracts_mean", [False, True])
def test_the_sum_with_a_residual_is_normalised(subtracts_mean: bool, dtype: torch.dtype) -> None:
    x, residual, weight, bias = (torch.randn(shape).to(dtype) for shape in ((3, 40), (3, 40), (40,), (40,)))
    weights = NormWeights(weight, 1e-5, subtracts_mean, bias if subtracts_mean else None)
    total, normed = norm.add_norm(x, residual, weight, weights.bias, 1e-5, subtracts_mean=subtracts_mean)
    torch.testing.assert_close(total, x + residual, **tolerance(dtype))
    torch.testing.assert_close(normed, normalise(total, weights), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("subtracts_mean", [False, True])
@pytest.mark.parametrize("has_factor", [False, True])
def test_hidden_states_are_added_and_scaled_in_the_same_launch(
    has_factor: bool, subtracts_mean: bool, dtype: torch.dtype
) -> None:
    hidden, x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((3, 100), (3, 100), (100,), (100,)))
    factor = torch.tensor([0.75]).to(dtype) if has_factor else None
    norm_weights = NormWeights(weight, 1e-6, subtracts_mean, bias if subtracts_mean else None)
    expected = add_normalised(
        hidden.double(), x.double(), _wide(norm_weights), None if factor is None else factor.double()
    )
    with triton_alone(norm) as started:
        found = add_normalised(hidden, x, norm_weights, factor)
    assert len(started) == 1
    torch.testing.assert_close(found.double(), expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("subtracts_mean", [False, True])
def test_the_result_is_normalised_for_the_next_step(subtracts_mean: bool, dtype: torch.dtype) -> None:
    hidden, x = (torch.randn(3, 100).to(dtype) for _ in range(2))
    first, second = (
        NormWeights(
            (torch.randn(100) / 4 + 1).to(dtype),
            eps,
            subtracts_mean,
            torch.randn(100).to(dtype) if subtracts_mean else None,
        )
        for eps in (1e-6, 1e-5)
    )
    with triton_alone(norm) as started:
        out, normed = add_normalised_norm(hidden, x, first, second)
    assert len(started) == 1
    expected = add_normalised(hidden.double(), x.double(), _wide(first))
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype))
    limits = {name: 2 * most for name, most in tolerance(dtype).items()}
    torch.testing.assert_close(normed.double(), normalise(expected, _wide(second)), **limits)


def _wide(weights: NormWeights) -> NormWeights:
    bias = None if weights.bias is None else weights.bias.double()
    return NormWeights(weights.weight.double(), weights.eps, weights.subtracts_mean, bias)
