import math

import pytest
import torch

from moeflow.kernels.activation import silu_and_mul


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (1, 1), (3, 5), (17, 32)])
def test_the_first_half_gates_the_second(rows, width):
    gate_up = torch.randn(rows, 2 * width) * 4
    before = gate_up.clone()
    got = silu_and_mul(gate_up)
    assert got.shape == (rows, width)
    for values, results in zip(gate_up.tolist(), got.tolist(), strict=True):
        want = [g / (1 + math.exp(-g)) * u for g, u in zip(values[:width], values[width:], strict=True)]
        assert results == pytest.approx(want, abs=1e-5)
    assert torch.equal(gate_up, before)
