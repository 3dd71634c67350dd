"""Blocks of grids as blocks of levels: no value is another than gguf's own reader finds, whatever the bits."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.checkpoint.gguf.grids import LEVEL_KINDS, level_blocks
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.weight_format import FORMATS
from tests.kernels.blocks import values_of

KINDS = pytest.mark.parametrize("kind", list(LEVEL_KINDS), ids=lambda kind: kind.name)


def blocks_of(kind, count, seed):
    """Return blocks of random bytes and their values; places and signs of a grid come in all combinations."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    blocks = np.random.default_rng(seed).integers(0, 256, (count, num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # scales may be infinite or NaN
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(blocks), torch.from_numpy(values.reshape(count, size))


def assert_same(got, want):
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@KINDS
@settings(max_examples=20)
@given(count=st.integers(1, 40), seed=st.integers(0, 1 << 30))
def test_values_are_those_of_the_gguf_package(kind, count, seed):
    blocks, values = blocks_of(kind, count, seed)
    with np.errstate(all="ignore"):
        assert_same(values_of(LEVEL_KINDS[kind], level_blocks(blocks.flatten(), kind)), values)


@KINDS
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_they_are_packed_without_loss(kind):
    blocks, values = blocks_of(kind, 3000, seed=1)  # so many that every place of the largest grid is among them
    rows = level_blocks(blocks.flatten(), kind).view(30, -1)
    weight_format = next(name for name in FORMATS if LEVEL_KINDS[kind] in FORMATS[name].keeps)
    packed = PackedWeight.allocate(30, values.numel() // 30, weight_format)
    packed.fill(rows, torch.arange(30), LEVEL_KINDS[kind])
    assert_same(packed.unpack(), values.view(30, -1))
