"""Blocks found by search: gguf's own reader gives their values, brute force the least possible error."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.weight_format import FORMATS, SEARCHED_FORMATS, block_kind
from tests.kernels.blocks import columns_of, random_blocks, values_of

pytestmark = pytest.mark.usefixtures("needs_kernels")
CODES = {
    "iq4_nl": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float64),
    "q5_0": np.arange(-16, 16, dtype=np.float64),
}
SUB_BLOCK = {"q4_k": 32, "q5_k": 32, "q6_k": 16}


def quantized(values, weight_format, importance=None):
    """Return [rows, cols] float32: what blocks of these values stand for, as the kernels read them."""
    weight = PackedWeight.allocate(*values.shape, weight_format)
    weight.fill(values, np.arange(len(values)), importance=None if importance is None else importance.numpy())
    return torch.as_tensor(weight.unpack())


def blocks_of(values, weight_format, importance=None):
    """Return [rows, bytes of a row] uint8: the blocks themselves."""
    weight = PackedWeight.allocate(*values.shape, weight_format)
    return torch.from_numpy(weight._blocks(values, None, None if importance is None else importance.numpy()))


def normal(rows, cols, seed=0, scale=0.02):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * scale


def uneven(cols, seed=1):
    return torch.rand(cols, generator=torch.Generator().manual_seed(seed)) ** 4 + 0.01


def error(values, got, importance):
    return ((got - values).double().square() * importance.double()).sum(dim=-1)


def least_error_of_a_scale(w, h, codes):
    """Return the least error with any scale of either sign: all scales near are tried, closely."""
    largest = np.abs(w).max()
    scales = np.linspace(-1.4, 1.4, 20001) * largest / np.abs(codes).max()
    middles = (codes[1:] + codes[:-1]) / 2
    scales = scales[scales != 0][:, None]
    nearest = codes[np.searchsorted(middles, w / scales)]
    return float((h * (scales * nearest - w) ** 2).sum(axis=1).min())


def least_error_of_a_line(w, h, most):
    """Return the least error of `scale * code - low` with any scale and any low that are not negative."""
    low_end, high_end = min(w.min(), 0.0), max(w.max(), 0.0)
    best = np.inf
    for low in np.linspace(0.5, 1.15, 131) * -low_end:
        scales = np.linspace(0.5, 1.15, 131)[:, None] * (high_end + low) / most
        codes = np.clip(np.rint((w + low) / scales), 0, most)
        best = min(best, float((h * (scales * codes - low - w) ** 2).sum(axis=1).min()))
    return best


@pytest.mark.parametrize("weight_format", SEARCHED_FORMATS)
class TestBlocks:
    def test_they_stand_for_what_gguf_reads(self, weight_format):
        values, importance = normal(37, 512), uneven(512)
        blocks = blocks_of(values, weight_format, importance)
        assert (
            blocks.shape[1]
            == gguf.quant_shape_to_byte_shape((512,), gguf.GGMLQuantizationType[block_kind(weight_format)])[0]
        )
        assert torch.equal(quantized(values, weight_format, importance), values_of(block_kind(weight_format), blocks))

    def test_closer_than_plain_rounding_to_as_many_bits(self, weight_format):
        """A group's numbers rounded to 2^b levels between its extremes, scales exact."""
        bits = {"q5_0": 5, "q4_k": 4, "q5_k": 5, "q6_k": 6, "iq4_nl": 4}[weight_format]
        values = normal(16, 1024)
        groups = values.unflatten(1, (-1, SUB_BLOCK.get(weight_format, 32)))
        step = groups.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
        plain = ((groups / step - 0.5).round() + 0.5).mul(step).flatten(1)
        mine = error(values, quantized(values, weight_format), torch.ones(1024)).sum()
        assert mine < 0.9 * error(values, plain, torch.ones(1024)).sum()

    def test_what_counts_more_is_kept_better(self, weight_format):
        values, importance = normal(16, 512), uneven(512)
        without, weighted = (
            error(values, quantized(values, weight_format, it), importance) for it in (None, importance)
        )
        assert weighted.sum() < 0.9 * without.sum()

    def test_alike_is_the_same_as_nothing_said(self, weight_format):
        values = normal(5, 512)
        assert torch.equal(quantized(values, weight_format), quantized(values, weight_format, torch.ones(512)))

    def test_values_of_blocks_come_back(self, weight_format):
        """What such blocks can hold without loss is nearly found again, wherever it came from."""
        blocks = random_blocks(block_kind(weight_format), 8, 512)
        values = values_of(block_kind(weight_format), blocks)
        off = (quantized(values, weight_format) - values).norm()
        assert off <= 0.06 * values.norm()

    def test_from_each_type_of_floats_and_from_blocks(self, weight_format):
        values = normal(7, 512)
        for narrow in (values.bfloat16(), values.half()):
            assert torch.equal(quantized(narrow, weight_format), quantized(narrow.float(), weight_format))
        blocks = random_blocks("Q8_0", 7, 512)
        weight = PackedWeight.allocate(7, 512, weight_format)
        weight.fill(blocks, np.arange(7), "Q8_0")
        assert torch.equal(torch.as_tensor(weight.unpack()), quantized(values_of("Q8_0", blocks), weight_format))

    def test_zeros_and_constants(self, weight_format):
        assert not quantized(torch.zeros(3, 512), weight_format).any()
        for constant in (0.5, -0.5, 0.05):
            values = torch.full((2, 512), constant)
            assert torch.allclose(quantized(values, weight_format), values, rtol=0.02)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
    def test_a_value_that_cannot_be_shows_and_others_do_not(self, weight_format, value):
        values = normal(3, 512)
        want = quantized(values, weight_format)
        values[1, 300] = value
        got = quantized(values, weight_format)
        block = columns_of(block_kind(weight_format))
        hit = slice(300 // block * block, 300 // block * block + block)
        assert not got[1, hit].isfinite().any()
        got[1, hit] = want[1, hit]
        assert torch.equal(got, want)

    @settings(max_examples=20)
    @given(exponent=st.integers(-44, 4), seed=st.integers(0, 99), zeros=st.integers(0, 200))
    def test_any_magnitude(self, weight_format, exponent, seed, zeros):
        """Values too small for fp16 scales may become zeros, none becomes worse than that."""
        values, importance = normal(1, 256, seed, scale=10.0**exponent), uneven(256, seed)
        values[0, :zeros] = 0
        got = quantized(values, weight_format, importance)
        assert got.isfinite().all()
        found, of_zeros = error(values, got, importance), error(values, torch.zeros(1, 256), importance)
        assert found <= (0.04 if exponent >= -2 else 1.0001) * of_zeros

    def test_importance_is_of_the_columns(self, weight_format):
        with pytest.raises(ValueError, match=r"512"):
            quantized(normal(2, 512), weight_format, torch.ones(256))


@pytest.mark.parametrize("weight_format", CODES)
@pytest.mark.parametrize("seed", range(4))
def test_one_scale_is_as_good_as_brute_force(weight_format, seed):
    values, importance = normal(1, 32, seed), uneven(32, seed)
    w, h = values[0].double().numpy(), importance.double().numpy()
    found = error(values, quantized(values, weight_format, importance), importance).item()
    assert found <= 1.02 * least_error_of_a_scale(w, h, CODES[weight_format])


@pytest.mark.parametrize("weight_format", ["q4_k", "q5_k"])
def test_two_levels_come_near_lines_of_each_sub_block_alone(weight_format):
    """Brute force has exact scales and minima for each 32 values, where blocks have six bits for each."""
    values, importance = normal(2, 256), uneven(256)
    found = error(values, quantized(values, weight_format, importance), importance).sum().item()
    most = 15 if weight_format == "q4_k" else 31
    bound = sum(
        least_error_of_a_line(w.double().numpy(), h.double().numpy(), most)
        for row in values
        for w, h in zip(row.split(32), importance.split(32), strict=True)
    )
    assert found <= (1.15 if weight_format == "q4_k" else 1.4) * bound


def test_two_levels_of_scales_come_near_scales_of_each_sub_block_alone():
    values, importance = normal(2, 256), uneven(256)
    found = error(values, quantized(values, "q6_k", importance), importance).sum().item()
    codes = np.arange(-32, 32, dtype=np.float64)
    bound = sum(
        least_error_of_a_scale(w.double().numpy(), h.double().numpy(), codes)
        for row in values
        for w, h in zip(row.split(16), importance.split(16), strict=True)
    )
    assert found <= 1.4 * bound


def test_formats_of_which_blocks_are_searched_for_hold_one_kind():
    assert {"q4_k", "q6_k", "iq4_nl", "q5_0"} <= set(SEARCHED_FORMATS)
    assert not any(FORMATS[name].is_made for name in SEARCHED_FORMATS)
