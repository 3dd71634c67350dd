"""Slices of experts by the CPU extension: side by side what whole experts give, under every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeflow.kernels.activation import ClampedSwiglu
from moeflow.kernels.cpu.expert_slices import PackedExpertSlices, SliceShape
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.weight_format import WEIGHT_FORMATS

NUM_EXPERTS, HIDDEN, WIDTH = 4, 70, 52
UNITS = [range(0, 16), range(16, 16), range(16, 52)]
OUTPUTS = [range(0, 48), range(48, 64), range(64, 70)]


def slices(whole, *, is_wide):
    """Return three slices, which look at the memory of whole experts."""
    return [
        PackedExpertSlices(
            SliceShape(
                hidden=HIDDEN,
                width=WIDTH,
                units=units,
                outputs=outputs,
                up_format=whole.format,
                down_format=whole.down_format,
            ),
            torch.stack(list(whole.storage)),
            kind=whole.kind,
            biases=whole.biases,
            is_wide=is_wide,
            is_whole=True,
        )
        for units, outputs in zip(UNITS, OUTPUTS, strict=True)
    ]


def test_a_slice_has_matrices_in_two_formats_as_the_whole_does(isa):
    generator = torch.Generator().manual_seed(2)
    whole = PackedExperts(NUM_EXPERTS, HIDDEN, WIDTH, "int4", down_format="int8")
    for gate, up, down in whole.parts():
        for part, shape in ((gate, (WIDTH, HIDDEN)), (up, (WIDTH, HIDDEN)), (down, (HIDDEN, WIDTH))):
            part.fill(torch.randn(shape, generator=generator), np.arange(shape[0]))
    parts = slices(whole, is_wide=False)
    x, residual = torch.randn(2, 9, HIDDEN, generator=generator)
    weights, ids = torch.rand(9, NUM_EXPERTS, generator=generator).topk(3)
    units = torch.cat([part.units(x, ids) for part in parts], dim=1)
    got = [
        part.sums(units, ids, weights, residual[:, outputs.start : outputs.stop].contiguous())
        for part, outputs in zip(parts, OUTPUTS, strict=True)
    ]
    assert torch.equal(torch.cat(got, dim=1), whole.compute(x, ids, weights, residual))


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_side_by_side_they_give_the_bits_of_whole_experts(isa, weight_format, is_wide):
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, generator=generator)
    down = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, generator=generator)
    biases = ExpertBiases(*(torch.randn(NUM_EXPERTS, size, generator=generator) for size in (2 * WIDTH, HIDDEN)))
    function, biases = ("silu", None) if weight_format == "bfloat16" else (ClampedSwiglu(1.7, 7.0), biases)
    whole = PackedExperts.pack(gate_up, down, weight_format, function=function, biases=biases, is_wide=is_wide)
    parts = slices(whole, is_wide=is_wide)
    for num_tokens, top_k in ((1, 2), (9, 3), (40, 1)):
        x, residual = torch.randn(2, num_tokens, HIDDEN, generator=generator)
        weights, ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(top_k)
        units = torch.cat([part.units(x, ids) for part in parts], dim=1)
        assert units.shape == (num_tokens * top_k, WIDTH)
        got = [
            part.sums(units, ids, weights, residual[:, outputs.start : outputs.stop].contiguous())
            for part, outputs in zip(parts, OUTPUTS, strict=True)
        ]
        assert torch.equal(torch.cat(got, dim=1), whole.compute(x, ids, weights, residual))


def test_units_are_in_the_order_of_expert_then_token(needs_kernels):
    gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    whole = PackedExperts.pack(gate_up, torch.zeros(NUM_EXPERTS, HIDDEN, WIDTH), "float32")
    x, ids = torch.randn(3, HIDDEN), torch.tensor([[2, 0], [0, 1], [2, 1]])
    units = torch.cat([part.units(x, ids) for part in slices(whole, is_wide=False)], dim=1)
    for row, (expert, token) in enumerate([(0, 0), (0, 1), (1, 1), (1, 2), (2, 0), (2, 2)]):
        gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
        torch.testing.assert_close(units[row].double(), torch.nn.functional.silu(gate) * up, atol=1e-4, rtol=1e-4)


def test_arguments_that_do_not_fit_are_refused(needs_kernels):
    whole = PackedExperts.pack(
        torch.zeros(NUM_EXPERTS, 2 * WIDTH, HIDDEN), torch.zeros(NUM_EXPERTS, HIDDEN, WIDTH), "float32"
    )
    part, ids, weights = slices(whole, is_wide=False)[0], torch.tensor([[0], [1]]), torch.ones(2, 1)
    with pytest.raises(ValueError, match="float32"):
        part.units(torch.zeros(2, HIDDEN - 1), ids)
    with pytest.raises(ValueError, match="int64"):
        part.units(torch.zeros(2, HIDDEN), ids.int())
    with pytest.raises(ValueError, match="float32"):
        part.sums(torch.zeros(2, len(UNITS[0])), ids, weights, None)
    with pytest.raises(ValueError, match="float32"):
        part.sums(torch.zeros(2, WIDTH), ids, weights, torch.zeros(2, HIDDEN))
    with pytest.raises(ValueError, match="float32"):
        part.sums(torch.zeros(2, WIDTH), ids, weights.double(), None)
    with pytest.raises(IndexError, match="not there"):
        part.units(torch.zeros(2, HIDDEN), ids + NUM_EXPERTS)
