"""Types and blocks of GGUF against the gguf package."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from moeflow.checkpoint.gguf.blocks import widen_blocks
from moeflow.checkpoint.gguf.tensor_types import BLOCK_SIZES, BLOCKS, SUPPORTED, TensorType


def test_types_are_those_of_the_gguf_package():
    assert {kind.name: kind.value for kind in TensorType} == {
        kind.name: kind.value for kind in gguf.GGMLQuantizationType
    }


def test_sizes_are_those_of_the_gguf_package():
    assert {kind: gguf.GGML_QUANT_SIZES[kind] for kind in SUPPORTED} == BLOCK_SIZES


@pytest.mark.parametrize("kind", BLOCKS)
@given(data=st.data())
def test_blocks_mean_what_the_gguf_package_says(kind, data):
    size = BLOCK_SIZES[kind][1]
    raw = data.draw(st.integers(1, 3).flatmap(lambda count: st.binary(min_size=count * size, max_size=count * size)))
    with np.errstate(all="ignore"):  # scales that are infinite or NaN
        expected = dequantize(np.frombuffer(raw, np.uint8), gguf.GGMLQuantizationType(kind))
    values = widen_blocks(torch.frombuffer(bytearray(raw), dtype=torch.uint8), kind)
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy(), expected)
