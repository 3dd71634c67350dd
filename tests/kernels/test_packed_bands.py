"""Experts in the layout of GPU kernels have exactly the values of packed ones, whatever their sizes."""

from __future__ import annotations

import pytest
import torch

from moeflow.kernels.activation import Activation
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.packed_bands import FORMATS, ExpertLayout, PlainMatrices, empty_like, store
from moeflow.kernels.triton.planar_rows import empty_planar, made_format
from moeflow.kernels.triton.planar_weights import PlanarWeights, pack
from moeflow.kernels.weight_format import FORMATS as KNOWN
from moeflow.kernels.weight_format import PLANAR_BITS, WeightFormat
from tests.kernels.blocks import block_experts, columns_of, kind_of

pytestmark = pytest.mark.skipif(not extension.is_available(), reason="no kernels here")

NUM_EXPERTS = 3
MADE = tuple(name for name in FORMATS if KNOWN[name].is_made)
OF_FILES = tuple(name for name in FORMATS if not KNOWN[name].is_made)


def _experts(weight_format: WeightFormat, hidden: int, width: int, function: Activation) -> PackedExperts:
    torch.manual_seed(hidden + width)
    num_ups = 2 if function == "silu" else 1
    gate_up = torch.randn(NUM_EXPERTS, num_ups * width, hidden).bfloat16().float()
    down = torch.randn(NUM_EXPERTS, hidden, width).bfloat16().float()
    return PackedExperts.pack(gate_up, down, weight_format, function=function)


def _values(matrices: PlainMatrices) -> torch.Tensor:
    if isinstance(matrices, PlanarWeights):
        return torch.stack([matrices[number] for number in range(len(matrices))])
    return matrices.float()


@pytest.mark.parametrize("function", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("weight_format", MADE)
@pytest.mark.parametrize(("hidden", "width"), [(64, 96), (96, 32), (40, 24)])
def test_no_value_changes(weight_format: WeightFormat, hidden: int, width: int, function: Activation) -> None:
    if weight_format in ("int8", "int4") and width % 32:
        pytest.skip("integers have whole groups on GPUs")
    packed = _experts(weight_format, hidden, width, function)
    plain = ExpertLayout.of(packed).plain(packed.storage)
    for expected, got in zip(packed.unpack(), plain, strict=True):
        assert torch.equal(_values(got), expected)


@pytest.mark.parametrize("slot_format", ["int8", "int4"])
def test_integers_reach_slots_of_any_format(slot_format: str) -> None:
    packed = _experts("int4", 64, 96, "silu")
    expected = packed.unpack()[0]
    plain = ExpertLayout.of(packed).plain(packed.storage)[0]
    slots = empty_planar(made_format(slot_format), (5, 192, 64), torch.device("cpu"))
    store(plain, slots, 1)
    of_floats = pack(expected, made_format(slot_format))
    assert torch.equal(_values(slots)[1:4], expected if slot_format == "int4" else _values(of_floats))
    floats = torch.zeros(5, 192, 64)
    store(plain, floats, 2)
    assert torch.equal(floats[2:], expected)
    assert not floats[:2].any()


@pytest.mark.parametrize("weight_format", OF_FILES)
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_blocks_of_files_keep_their_values(weight_format: WeightFormat, num_blocks: int) -> None:
    size = columns_of(kind_of(weight_format)) * num_blocks
    packed = block_experts(weight_format, NUM_EXPERTS, size, size)
    plain = ExpertLayout.of(packed).plain(packed.storage)
    for expected, got in zip(packed.unpack(), plain, strict=True):
        assert isinstance(got, PlanarWeights)
        assert got.shape == tuple(expected.shape)
        assert torch.equal(_values(got), expected)


def test_all_formats_of_gpu_kernels_have_a_way_there() -> None:
    assert set(FORMATS) == {"float32", "bfloat16", *PLANAR_BITS}


def test_slots_of_the_same_format_get_the_same_planes() -> None:
    packed = block_experts("q4_k", NUM_EXPERTS, 256, 256)
    plain = ExpertLayout.of(packed).plain(packed.storage)[0]
    slots = empty_like(plain, 5)
    store(plain, slots, 2)
    assert isinstance(plain, PlanarWeights)
    assert isinstance(slots, PlanarWeights)
    assert torch.equal(slots.values[2:], plain.values)
    assert torch.equal(slots.scales[2:], plain.scales)
