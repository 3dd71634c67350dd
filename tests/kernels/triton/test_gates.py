"""Gates by Triton, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moeflow.kernels.cpu import recurrent as cpu
from moeflow.kernels.recurrent.gates import gated_norm, sigmoid_gate
from moeflow.kernels.triton import gates as triton_gates
from tests.kernels.triton.launches import triton_alone
from tests.kernels.triton.tolerance import tolerance

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


@pytest.fixture(autouse=True)
def _no_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_AVAILABLE", False)


@DTYPES
@pytest.mark.parametrize("is_gated_first", [False, True])
@pytest.mark.parametrize("num_weights", [1, 3])
def test_norms_with_gates_are_those_of_float64(num_weights: int, is_gated_first: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(5, 3 * 20).to(dtype), torch.randn(num_weights, 20)
    gate = torch.randn(5, 70).to(dtype)[:, 4:64]
    wide, share = x.double().unflatten(1, (3, 20)), functional.silu(gate.double()).unflatten(1, (3, 20))
    wide = wide * share if is_gated_first else wide
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    want = (normed if is_gated_first else normed * share).flatten(1)
    with triton_alone(triton_gates) as started:
        found = gated_norm(x, gate, weight, 1e-5, is_gated_first=is_gated_first)
    assert len(started) == 1
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), want, **tolerance(dtype))


@DTYPES
def test_sigmoid_gates_are_those_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x, gate = torch.randn(3, 37).to(dtype), torch.randn(3, 50).to(dtype)[:, 9:46]
    with triton_alone(triton_gates) as started:
        found = sigmoid_gate(x, gate)
    assert len(started) == 1
    torch.testing.assert_close(found.double(), x.double() * gate.double().sigmoid(), **tolerance(dtype))
