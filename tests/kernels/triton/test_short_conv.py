"""Short convolutions by Triton, against torch's in float64, in passes that are cut in any way."""

from __future__ import annotations

import pytest
import torch

from moeflow.kernels.cpu import recurrent as cpu
from moeflow.kernels.recurrent.short_conv import short_conv
from moeflow.kernels.recurrent.state_sequences import NO_STATE, LayerStates, StateSequence, StateSequences
from moeflow.kernels.recurrent.state_table import StateTable
from moeflow.kernels.triton import short_conv as triton_conv
from tests.kernels.recurrent.passes import mixed
from tests.kernels.recurrent.test_short_conv import KINDS, make
from tests.kernels.triton.launches import last_program_first, triton_alone
from tests.kernels.triton.tolerance import tolerance


@pytest.fixture(autouse=True)
def _no_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_AVAILABLE", False)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_is_torchs_convolution(
    num_channels: int, num_taps: int, has_gates: bool, has_silu: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    run, inputs, size, want = make(num_channels, num_taps, has_gates, has_silu, has_bias, dtype)
    with triton_alone(triton_conv) as started:
        found = mixed(run, inputs, size)
    assert len(started) == 3  # passes
    assert found.dtype is dtype
    allowed = tolerance(dtype)
    torch.testing.assert_close(found.double(), want, rtol=3 * allowed["rtol"], atol=6 * allowed["atol"])


def test_tokens_are_the_same_in_passes_of_decodes_and_in_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_conv, "_TOKEN_BLOCK", 2)
    torch.manual_seed(1)
    x, weight = torch.randn(5, 33), torch.randn(33, 4)
    slots = torch.full((3, 2 + 3 * 33), torch.nan)
    with triton_alone():
        found, states = [], LayerStates(slots, offset=2)
        for rows, source, target, saves in (
            (x, NO_STATE, 0, [(1, 1), (4, 2)]),
            (x[1:2], 1, 1, []),
            (x[2:3], 1, 1, []),
            (x[3:4], 1, 1, []),
        ):
            sequences = StateSequences([StateSequence(0, len(rows), source, target, saves)])
            found.append(short_conv(rows, weight, None, states, sequences, has_silu=True))
    torch.testing.assert_close(torch.cat(found[1:]), found[0][1:4], rtol=0, atol=0)
    assert slots[1, 2:].equal(slots[2, 2:])
    assert slots[0, 2:].equal(x[2:5].flatten())
    assert slots[:, :2].isnan().all()


def test_a_sequence_waits_for_one_of_the_same_pass_that_stores_its_state() -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(5, 8), torch.randn(8, 3)
    states = LayerStates(torch.full((3, 16), torch.nan))
    sequences = StateSequences([StateSequence(0, 3, NO_STATE, 0, [(2, 1)]), StateSequence(3, 2, 1, 2)])
    with triton_alone(), last_program_first():
        found = short_conv(x, weight, None, states, sequences)
    spare = LayerStates(torch.zeros(1, 16))
    want = short_conv(x[[0, 1, 3, 4]], weight, None, spare, StateSequences([StateSequence(0, 4, NO_STATE, 0)]))
    torch.testing.assert_close(found[3:], want[2:])


def test_rows_of_padding_store_nothing() -> None:
    torch.manual_seed(2)
    x, weight, bias = torch.randn(4, 8), torch.randn(8, 3), torch.randn(8)
    slots = torch.randn(3, 16)
    before = slots.clone()
    # The second stores nothing, the third has no tokens.
    sequences = torch.tensor(
        [[0, 1, 0, 3], [1, 1, -1, -1], [0, 1, 2, 2], [1, 2, 2, 3], [1, 2, 3, 4]], dtype=torch.int32
    )
    stores = torch.tensor([[1, 1, 1], [1, -1, 2]], dtype=torch.int32)
    given = StateSequences((), StateTable(sequences, stores, 1))
    alone = StateSequences([StateSequence(0, 1, 1, 1), StateSequence(3, 1, NO_STATE, 2)])
    with triton_alone():
        found = short_conv(x, weight, bias, LayerStates(slots), given)
        want = short_conv(x, weight, bias, LayerStates(before), alone)
    assert found[1].isfinite().all()
    assert torch.equal(found[[0, 3]], want[[0, 3]])
    assert torch.equal(slots, before)
