"""The recurrent layer against torch's, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.lstm import lstm
from moeflow.kernels.cpu.packed_weight import PackedWeight
from tests.kernels.cpu_reference import ROUNDING_ISAS

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


def run(layer, x, weight_format, state, cell):
    gates = x @ layer.weight_ih_l0.T + layer.bias_ih_l0 + layer.bias_hh_l0
    return lstm(gates, PackedWeight.pack(layer.weight_hh_l0, weight_format), state, cell)


@pytest.mark.parametrize("weight_format", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 16, 40, 256])
@pytest.mark.parametrize(("num_steps", "num_texts"), [(1, 1), (7, 1), (3, 13), (0, 2), (2, 0)])
def test_it_is_torchs(isa, weight_format, size, num_steps, num_texts):
    torch.manual_seed(size)
    layer = nn.LSTM(5, size).requires_grad_(False)
    if weight_format == "bfloat16":
        layer.weight_hh_l0.copy_(layer.weight_hh_l0.bfloat16())
    x, state, cell = torch.randn(num_steps, num_texts, 5), torch.randn(num_texts, size), torch.randn(num_texts, size)
    new_state, new_cell = state.clone(), cell.clone()
    out = run(layer, x, weight_format, new_state, new_cell)
    if num_steps and num_texts:
        expected, (last, last_cell) = layer(x, (state[None], cell[None]))
        tolerance = 2e-2 if weight_format == "bfloat16" and isa in ROUNDING_ISAS else 1e-5  # states are rounded, too
        for found, wanted in ((out, expected), (new_state, last[0]), (new_cell, last_cell[0])):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        assert torch.equal(out[-1], new_state)
    else:
        assert out.shape == (num_steps, num_texts, size)
        assert torch.equal(state, new_state)


def test_a_texts_bits_do_not_depend_on_others_nor_on_pieces(isa):
    torch.manual_seed(1)
    weights = PackedWeight.pack(torch.randn(160, 40), "bfloat16")
    gates, state, cell = torch.randn(6, 15, 160), torch.randn(15, 40), torch.randn(15, 40)
    together = lstm(gates, weights, state.clone(), cell.clone())
    for text in (0, 11, 14):
        own, own_cell = state[text : text + 1].clone(), cell[text : text + 1].clone()
        of_text = gates[:, text : text + 1].contiguous()
        pieces = [lstm(of_text[steps], weights, own, own_cell) for steps in (slice(0, 1), slice(1, 6))]
        assert torch.equal(torch.cat(pieces)[:, 0], together[:, text])


def test_extreme_gates_saturate(isa):
    weights = PackedWeight.pack(torch.zeros(4 * 16, 16), "float32")
    for value, expected in ((1e30, 1.0), (-1e30, 0.0)):
        state, cell = torch.zeros(1, 16), torch.zeros(1, 16)
        lstm(torch.full((3, 1, 64), value), weights, state, cell)
        assert torch.isfinite(state).all()
        wanted = torch.tensor([1.0, 2.0, 3.0][-1]) if expected else torch.tensor(0.0)
        torch.testing.assert_close(cell, wanted.expand(1, 16))


def test_what_does_not_fit_is_refused():
    weights = PackedWeight.pack(torch.zeros(64, 16), "float32")
    for shapes in (((1, 1, 63), (1, 16)), ((1, 2, 64), (1, 16)), ((1, 1, 64), (1, 15))):
        with pytest.raises(ValueError, match="float32"):
            lstm(torch.zeros(shapes[0]), weights, torch.zeros(shapes[1]), torch.zeros(shapes[1]))
    with pytest.raises(ValueError, match="four gates"):
        lstm(torch.zeros(1, 1, 63), PackedWeight.pack(torch.zeros(63, 16), "float32"), *[torch.zeros(1, 16)] * 2)
