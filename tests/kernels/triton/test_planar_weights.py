"""Planar weights have the values of the CPU's formats."""

import pytest
import torch

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.triton.planar_blocks import from_blocks
from moeflow.kernels.triton.planar_weights import MadeFormat, pack
from moeflow.kernels.weight_format import BlockKind
from tests.kernels.blocks import random_blocks, values_of

KINDS: tuple[BlockKind, ...] = (
    *("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "MXFP4", "F8_E4M3"),
    *("INT4_G128", "INT4_G64", "INT4_G32", "INT8_G128", "Q4_K", "Q5_K", "Q6_K"),
)


def matrices() -> torch.Tensor:
    """Random numbers of many sizes, a group of zeros, ties of magnitudes, and halves between steps."""
    weights = torch.randn(2, 48, 128) * torch.logspace(-3, 3, 48)[:, None]
    weights[0, 3, 32:64] = 0
    weights[0, 4, :32] = torch.tensor([-1.0, 1.0]).repeat(16)
    weights[1, 5, :32] = torch.arange(-15.5, 16.5)
    weights[1, 6, :32] = torch.arange(-127, 128, 8).float() + 0.5
    return weights


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_equal_the_cpu_format(dtype: torch.dtype, weight_format: MadeFormat) -> None:
    weights = matrices().to(dtype)
    planar = pack(weights, weight_format)
    assert planar.shape == weights.shape
    assert planar.format == weight_format
    for number, matrix in enumerate(weights):
        assert torch.equal(planar[number], PackedWeight.pack(matrix, weight_format).unpack())


@pytest.mark.parametrize(("weight_format", "num_bytes"), [("int8", 34), ("int4", 18)])
def test_a_group_takes_the_bytes_of_its_values_and_a_half(weight_format: MadeFormat, num_bytes: int) -> None:
    planar = pack(torch.randn(1, 3, 64), weight_format)
    assert planar.values.nbytes + planar.scales.nbytes == 6 * num_bytes


@pytest.mark.parametrize("is_extreme", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_blocks_do_not_change(kind: BlockKind, is_extreme: bool) -> None:
    blocks = torch.stack([random_blocks(kind, 5, 512, seed, is_extreme=is_extreme) for seed in range(2)])
    planar = from_blocks(blocks, kind)
    assert planar.shape == (2, 5, 512)
    for number, matrix in enumerate(blocks):
        torch.testing.assert_close(planar[number], values_of(kind, matrix), rtol=0, atol=0, equal_nan=True)
