"""Activations by Triton, against float64."""

import pytest
import torch

from moeflow.kernels.activation import NONLINEARITIES, Activation, ClampedSwiglu, apply_and_mul
from moeflow.kernels.triton import activation
from tests.kernels.triton.launches import triton_alone
from tests.kernels.triton.tolerance import tolerance

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of powers, in NumPy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [*NONLINEARITIES, ClampedSwiglu(1.702, 7.0)])
@pytest.mark.parametrize("size", [5, 1100])
def test_products_are_those_of_float64(size: int, function: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    gate_up = (torch.randn(2, 2 * size + 3) * 3).to(dtype)[:, : 2 * size]
    gate_up[0, :2] = torch.tensor([200.0, -200.0])
    want = apply_and_mul(function, gate_up.double())
    with triton_alone(activation) as started:
        found = apply_and_mul(function, gate_up)
    assert len(started) == 1
    assert found.dtype is dtype
    allowed = tolerance(dtype)
    torch.testing.assert_close(found.double(), want, rtol=2 * allowed["rtol"], atol=2 * allowed["atol"])


def test_gates_above_the_limit_and_ups_beyond_it_are_clamped() -> None:
    gate_up = torch.tensor([[9.0, -9.0, 1.0, 9.0, -9.0, 0.5]])
    function = ClampedSwiglu(1.0, 2.0)
    with triton_alone():
        found = apply_and_mul(function, gate_up)
    torch.testing.assert_close(found, apply_and_mul(function, gate_up))
