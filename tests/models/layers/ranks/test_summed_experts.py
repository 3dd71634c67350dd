"""Experts on several devices add up to those of one, in every format, however they are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.experts import fused_experts
from moeflow.kernels.triton.planar_weights import pack
from moeflow.models.layers.allocation.planar import PlanarAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.ranks.summed_experts import ExpertDevices
from moeflow.models.layers.rearranged import Rearranged
from moeflow.models.layers.weight_allocator import ExpertShape
from moeflow.parallel.device_group import DeviceGroup
from tests.parallel.thread_group import run_ranks

CPU = torch.device("cpu")
NUM_EXPERTS, HIDDEN, WIDTH, NUM_TOKENS, TOP_K = 5, 64, 96, 7, 2


def rounded(weights: torch.Tensor, weight_format: str) -> torch.Tensor:
    """Return the values that a format has for weights."""
    if weight_format == "float32":
        return weights
    packed = pack(weights, weight_format)
    return torch.stack([packed[number] for number in range(len(weights))])


def fill(part, source: torch.Tensor) -> None:
    """Load values into a part of an expert."""
    if isinstance(part, torch.Tensor):
        part.copy_(source)
    else:
        part.fill(source, np.arange(len(source)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("has_slices", [True, False], ids=["slices", "whole"])
@pytest.mark.parametrize(("weight_format", "has_biases"), [("float32", True), ("int8", False)])
def test_sums_are_those_of_one_device(weight_format, has_biases, has_slices, size):
    torch.manual_seed(0)
    gate_up, down = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN) / 8, torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) / 8
    x, residual = torch.randn(NUM_TOKENS, HIDDEN), torch.randn(NUM_TOKENS, HIDDEN)
    weights, ids = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(TOP_K)
    biases = ExpertBiases(torch.randn(NUM_EXPERTS, 2 * WIDTH), torch.randn(NUM_EXPERTS, HIDDEN)) if has_biases else None
    matrices = (rounded(it, weight_format) for it in (gate_up, down))
    want = fused_experts(x, *matrices, ids, weights, biases=biases, residual=residual)

    def compute(host):
        devices = ExpertDevices(DeviceGroup(host, CPU), has_slices)
        formats = WeightFormats(weight_format, "float32")
        allocator = PlanarAllocator(torch.float32, CPU, formats=formats, expert_devices=devices)
        experts = allocator.experts(ExpertShape(NUM_EXPERTS, HIDDEN, WIDTH), biases)
        num_own = 0
        for parts, ups, back in zip(experts.parts(), gate_up, down, strict=True):
            if parts is not None:
                num_own += 1
                for part, source in zip(parts, (*ups.chunk(2), back), strict=True):
                    fill(part, source)
        assert (num_own == NUM_EXPERTS) == has_slices
        return experts.compute(x, ids, weights, residual.clone())

    for found in run_ranks(size, compute):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_devices_hold_no_more_than_their_part():
    def held(host):
        devices = ExpertDevices(DeviceGroup(host, CPU), has_slices=True)
        allocator = PlanarAllocator(
            torch.float32, CPU, formats=WeightFormats("int8", "float32"), expert_devices=devices
        )
        (*_, down), *_ = allocator.experts(ExpertShape(NUM_EXPERTS, HIDDEN, WIDTH)).parts()
        assert isinstance(down, Rearranged)
        ((rows, (units,)),) = down.places
        return rows.shape, units

    assert run_ranks(2, held) == [((HIDDEN, 32), range(32)), ((HIDDEN, 64), range(32, 96))]
