"""Weights in the blocks of files: gguf's own reader or numpy gives their values, float64 gives the products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedWeight, matrix_bytes
from moeflow.kernels.experts import fused_experts
from moeflow.kernels.weight_format import FORMATS
from tests.kernels import cpu_reference as reference
from tests.kernels.blocks import (
    BLOCK_FORMATS,
    block_experts,
    block_weight,
    bytes_in_file,
    columns_of,
    filled_blocks,
    kind_of,
    random_blocks,
    values_of,
)
from tests.kernels.cpu_reference import assert_within
from tests.marks import thorough_unless

pytestmark = pytest.mark.parametrize("weight_format", BLOCK_FORMATS)


def make(rows, outputs, inputs, weight_format, seed=0, *, is_wide=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    return x, block_weight(weight_format, outputs, inputs, seed, is_wide=is_wide)


def check(x, weight, isa):
    assert_within(extension.linear(x, weight), *reference.linear(x, weight, isa))


class TestValues:
    @pytest.mark.parametrize("is_extreme", [False, True])
    def test_what_is_packed_is_what_is_read(self, needs_kernels, weight_format, is_extreme):
        kind = kind_of(weight_format)
        for rows, num_blocks in ((1, 1), (37, 3), (64, 4)):
            cols = columns_of(kind) * num_blocks
            blocks = random_blocks(kind, rows, cols, seed=rows, is_extreme=is_extreme)
            weight, order = PackedWeight.allocate(rows, cols, weight_format), torch.randperm(rows)
            weight.fill(blocks, order, kind)
            values = values_of(kind, blocks)
            assert torch.equal(weight.unpack()[order], values)
            wide = PackedWeight.allocate(rows, cols, "float32")
            wide.fill(blocks, order, kind)
            assert torch.equal(wide.unpack()[order], values)

    def test_rows_one_by_one_and_taken_out(self, needs_kernels, weight_format):
        kind, cols = kind_of(weight_format), 512
        blocks = random_blocks(kind, 40, cols)
        weight = PackedWeight.allocate(40, cols, weight_format)
        for row in range(40):
            weight.fill(blocks[row : row + 1], torch.tensor([row]), kind)
        assert torch.equal(weight.unpack(), values_of(kind, blocks))
        some = weight.take([range(3, 9), range(20, 40)])
        assert torch.equal(some.unpack(), values_of(kind, torch.cat([blocks[3:9], blocks[20:]])))

    def test_into_other_formats_they_go_as_floats(self, needs_kernels, weight_format):
        kind, cols = kind_of(weight_format), 512
        blocks = random_blocks(kind, 20, cols)
        packed = PackedWeight.allocate(20, cols, "int8")
        packed.fill(blocks, torch.arange(20), kind)
        assert torch.equal(packed.unpack(), PackedWeight.pack(values_of(kind, blocks), "int8").unpack())

    def test_all_else_is_searched_for_or_refused(self, needs_kernels, weight_format):
        weight = PackedWeight.allocate(2, 256, weight_format)
        other = next(it for it in BLOCK_FORMATS if it != weight_format)
        blocks = random_blocks(kind_of(other), 2, 256)
        for kind, source, values in (
            (None, torch.ones(2, 256), torch.ones(2, 256)),
            (kind_of(other), blocks, values_of(kind_of(other), blocks)),
        ):
            if FORMATS[weight_format].is_searched:
                weight.fill(source, torch.arange(2), kind)
                assert (weight.unpack() - values).norm() < 0.2 * values.norm()
                continue
            made_of = f"{weight_format} weights are kept as files have them, not made of {kind or 'float32'}"
            with pytest.raises(ValueError, match=made_of):
                weight.fill(source, torch.arange(2), kind)

    def test_columns_are_whole_blocks(self, needs_kernels, weight_format):
        multiple = columns_of(kind_of(weight_format))
        for cols in (multiple - 1, multiple + 16, 2 * multiple + 1):
            with pytest.raises(
                ValueError, match=f"{weight_format} weights have columns in multiples of {multiple}, not"
            ):
                matrix_bytes(weight_format, 16, cols)

    def test_memory_is_at_most_a_twentieth_more_than_the_file(self, needs_kernels, weight_format):
        in_file = bytes_in_file(kind_of(weight_format), 16, 2048)
        assert in_file <= matrix_bytes(weight_format, 16, 2048) <= 1.05 * in_file
        assert matrix_bytes(weight_format, 16, 2048) * 8 == FORMATS[weight_format].bits_per_value * 16 * 2048


@pytest.mark.parametrize("is_wide", [False, True])
class TestProducts:
    @pytest.mark.parametrize("outputs", thorough_unless(lambda it: it in (1, 17, 130), (1, 16, 17, 48, 65, 130)))
    def test_any_number_of_rows(self, isa, weight_format, is_wide, outputs):
        for rows in (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 25):
            check(*make(rows, outputs, 512, weight_format, is_wide=is_wide), isa)

    def test_inputs_down_to_one_block(self, isa, weight_format, is_wide):
        block = columns_of(kind_of(weight_format))
        for num_blocks in (1, 2, 3, 5, 9):
            check(*make(7, 40, block * num_blocks, weight_format, is_wide=is_wide), isa)

    @pytest.mark.usefixtures("some_threads")
    @settings(max_examples=15)
    @given(
        rows=st.integers(0, 30),
        outputs=st.integers(1, 150),
        num_blocks=st.integers(1, 4),
        num_threads=st.integers(1, 3),
        seed=st.integers(0, 99),
    )
    def test_shapes_that_hypothesis_makes_up(
        self, isa, weight_format, is_wide, rows, outputs, num_blocks, num_threads, seed
    ):
        extension.set_num_threads(num_threads)
        inputs = columns_of(kind_of(weight_format)) * num_blocks
        check(*make(rows, outputs, inputs, weight_format, seed, is_wide=is_wide), isa)

    @pytest.mark.usefixtures("some_threads")
    def test_same_bits_in_any_batch_and_at_any_number_of_threads(self, isa, weight_format, is_wide):
        x, weight = make(97, 200, 512, weight_format, is_wide=is_wide)
        alone = torch.cat([extension.linear(row.unsqueeze(0), weight) for row in x])
        for num_threads in (1, 2, 3):
            extension.set_num_threads(num_threads)
            assert torch.equal(extension.linear(x, weight), alone)
        for first, last in ((0, 7), (5, 6), (3, 20), (19, 31)):
            assert torch.equal(extension.linear(x[first:last], weight), alone[first:last])

    def test_outputs_do_not_depend_on_those_beside_them(self, isa, weight_format, is_wide):
        x, weight = make(7, 150, 512, weight_format, is_wide=is_wide)
        some = weight.take([range(5, 70), range(100, 101)])
        want = extension.linear(x, weight)
        assert torch.equal(extension.linear(x, some), torch.cat([want[:, 5:70], want[:, 100:101]], dim=1))

    def test_sums_of_the_largest_integers_do_not_overflow(self, isa, weight_format, is_wide):
        """All codes and small scales at once; where fp16 scales are, random blocks have theirs."""
        kind = kind_of(weight_format)
        weight = PackedWeight.allocate(3, 512, weight_format, is_wide=is_wide)
        for byte in (0x00, 0x7F, 0x80, 0xFF):
            weight.fill(filled_blocks(kind, 3, 512, byte), torch.arange(3), kind)
            check(torch.tensor([[1.0], [-1.0]]).repeat(1, 512), weight, isa)

    def test_a_row_that_is_not_finite_shows_and_others_do_not(self, isa, weight_format, is_wide):
        x, weight = make(9, 50, 512, weight_format, is_wide=is_wide)
        finite = extension.linear(x, weight)
        x[4, 300] = float("nan")
        got = extension.linear(x, weight)
        assert not got[4].isfinite().any()
        others = [row for row in range(9) if row != 4]
        assert torch.equal(got[others], finite[others])


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("num_tokens", thorough_unless(lambda it: it in (1, 13), (1, 2, 7, 13)))
def test_experts(isa, weight_format, num_tokens, is_wide):
    hidden, width = 512, 256
    packed = block_experts(weight_format, 5, hidden, width, is_wide=is_wide)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, generator=generator) / 16
    topk_ids = torch.rand(num_tokens, 5, generator=generator).argsort(dim=1)[:, :3].contiguous()
    topk_weights = torch.rand(num_tokens, 3, generator=generator)
    got = packed.compute(x, topk_ids, topk_weights)
    assert_within(got, *reference.experts(x, packed, topk_ids, topk_weights, isa))
    want = fused_experts(x, *packed.unpack(), topk_ids, topk_weights)
    tolerance = 4e-3 if weight_format == "fp8" else 2e-4 if is_wide else 3e-2  # bfloat16, 16 bits, 8 bits
    assert (got - want).norm() <= tolerance * want.norm()
