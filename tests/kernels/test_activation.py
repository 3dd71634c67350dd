import math

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from moeflow.kernels.activation import ClampedSwiglu, apply_and_mul


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (1, 1), (3, 5), (17, 32)])
def test_the_first_half_gates_the_second(rows, width):
    gate_up = torch.randn(rows, 2 * width) * 4
    before = gate_up.clone()
    got = apply_and_mul("silu", gate_up)
    assert got.shape == (rows, width)
    for values, results in zip(gate_up.tolist(), got.tolist(), strict=True):
        want = [g / (1 + math.exp(-g)) * u for g, u in zip(values[:width], values[width:], strict=True)]
        assert results == pytest.approx(want, abs=1e-5)
    assert torch.equal(gate_up, before)


def test_a_clamped_swiglu_is_that_of_gpt_oss():
    config = GptOssConfig(hidden_size=4, intermediate_size=8, num_local_experts=1, swiglu_alpha=1.3, swiglu_limit=2.0)
    gate_up = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)) * 3
    interleaved = gate_up.view(50, 2, 8).transpose(1, 2).reshape(50, 16)  # gate, up, gate, up, ..
    got = apply_and_mul(ClampedSwiglu(alpha=1.3, limit=2.0), gate_up)
    torch.testing.assert_close(got, GptOssExperts(config)._apply_gate(interleaved))
