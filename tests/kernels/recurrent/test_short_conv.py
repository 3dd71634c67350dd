"""Short convolutions against torch's, in passes that are cut in any way."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moeflow.kernels.recurrent.short_conv import short_conv
from tests.kernels.recurrent.passes import LENGTHS, alone, mixed, rows_of

KINDS = pytest.mark.parametrize(
    ("num_channels", "num_taps", "has_gates", "has_silu", "has_bias"),
    [(48, 3, True, False, False), (21, 4, False, True, True), (5, 1, True, True, False), (16, 2, False, False, True)],
)


def make(num_channels, num_taps, has_gates, has_silu, has_bias, dtype=torch.float32):
    torch.manual_seed(num_channels)
    inputs = torch.randn(sum(LENGTHS), 3 * num_channels, dtype=dtype)
    weight, bias = torch.randn(num_channels, num_taps), torch.randn(num_channels) if has_bias else None

    def run(rows, states, sequences):
        before, behind, x = rows.chunk(3, dim=1)
        gates = (before, behind) if has_gates else None
        return short_conv(x, weight, bias, states, sequences, gates=gates, has_silu=has_silu)

    def expected(rows):
        before, behind, x = rows.double().chunk(3, dim=1)
        seen = functional.pad((x * before if has_gates else x).T, (num_taps - 1, 0))
        found = functional.conv1d(
            seen, weight.double().unsqueeze(1), None if bias is None else bias.double(), groups=num_channels
        ).T
        found = functional.silu(found) if has_silu else found
        return found * behind if has_gates else found

    want = torch.cat([expected(inputs[list(rows_of(number))]) for number in range(3)])
    return run, inputs, (num_taps - 1) * num_channels, want


@KINDS
def test_it_is_torchs_convolution(isa, num_channels, num_taps, has_gates, has_silu, has_bias):
    run, inputs, size, want = make(num_channels, num_taps, has_gates, has_silu, has_bias)
    torch.testing.assert_close(mixed(run, inputs, size).double(), want, atol=2e-5, rtol=1e-5)


@KINDS
def test_a_tokens_bits_depend_on_its_sequence_alone(isa, num_channels, num_taps, has_gates, has_silu, has_bias):
    run, inputs, size, _ = make(num_channels, num_taps, has_gates, has_silu, has_bias)
    assert torch.equal(mixed(run, inputs, size), alone(run, inputs, size))


@KINDS
def test_without_kernels_it_is_the_same(num_channels, num_taps, has_gates, has_silu, has_bias):
    run, inputs, size, want = make(num_channels, num_taps, has_gates, has_silu, has_bias, torch.bfloat16)
    torch.testing.assert_close(mixed(run, inputs, size).double(), want, atol=0.05, rtol=0.05)
