"""Dense layers of the CPU extension, under every instruction set and in every format, against float64."""

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedWeight, unpack_rows
from tests.kernels import cpu_reference as reference
from tests.kernels.cpu_reference import FORMATS, assert_within, pack_weight

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 32, 33)  # tiles hold up to 32 rows
SIZES = (  # outputs, inputs: on, just below and just above bands of 16, groups of 32, tiles of 64
    (1, 1),
    (16, 32),
    (15, 31),
    (17, 33),
    (48, 64),
    (64, 2),
    (65, 70),
    (130, 96),
)


def make(rows, outputs, inputs, weight_format, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.1
    return torch.randn(rows, inputs, generator=generator), pack_weight(weight, weight_format)


def check(x, weight, isa):
    assert_within(extension.linear(x, weight), *reference.linear(x, weight, isa))


@pytest.mark.parametrize("weight_format", FORMATS)
class TestAgainstFloat64:
    @pytest.mark.parametrize(("outputs", "inputs"), SIZES)
    def test_any_number_of_rows(self, isa, weight_format, outputs, inputs):
        for rows in ROWS:
            check(*make(rows, outputs, inputs, weight_format), isa)

    def test_rows_around_the_block_that_stays_in_the_cache(self, isa, weight_format):
        for rows in (95, 96, 97):
            check(*make(rows, 50, 40, weight_format), isa)

    @pytest.mark.slow
    def test_thousands_of_rows(self, isa, weight_format):
        check(*make(3001, 200, 300, weight_format), isa)

    @pytest.mark.slow
    def test_long_sums(self, isa, weight_format):
        check(*make(7, 40, 10_000, weight_format), isa)

    @pytest.mark.usefixtures("some_threads")
    @settings(max_examples=15)
    @given(
        rows=st.integers(0, 30),
        outputs=st.integers(1, 150),
        inputs=st.integers(1, 150),
        num_threads=st.integers(1, 3),
        seed=st.integers(0, 99),
    )
    def test_shapes_that_hypothesis_makes_up(self, isa, weight_format, rows, outputs, inputs, num_threads, seed):
        extension.set_num_threads(num_threads)
        check(*make(rows, outputs, inputs, weight_format, seed), isa)


@pytest.mark.parametrize("weight_format", FORMATS)
class TestSameBits:
    """What a row's result may not depend on."""

    @pytest.mark.parametrize("rows", [2, 13, 97])
    def test_alone_and_in_a_batch(self, isa, weight_format, rows):
        x, weight = make(rows, 70, 45, weight_format)
        alone = torch.cat([extension.linear(row.unsqueeze(0), weight) for row in x])
        assert torch.equal(extension.linear(x, weight), alone)

    @pytest.mark.parametrize("rows", [7, 11, 16, 22, 29])
    def test_of_long_rows_that_are_multiplied_in_parts(self, isa, weight_format, rows):
        x, weight = make(rows, 50, 600, weight_format)
        alone = torch.cat([extension.linear(row.unsqueeze(0), weight) for row in x])
        assert torch.equal(extension.linear(x, weight), alone)

    def test_in_any_part_of_a_batch(self, isa, weight_format):
        x, weight = make(20, 33, 64, weight_format)
        whole = extension.linear(x, weight)
        for first, last in ((0, 7), (5, 6), (3, 20), (19, 20), (4, 6), (7, 10), (10, 14)):
            assert torch.equal(extension.linear(x[first:last], weight), whole[first:last])

    @pytest.mark.parametrize(("x_exponent", "weight_exponent"), [(-63, -63), (-126, 0)])
    def test_where_products_are_subnormal(self, isa, weight_format, x_exponent, weight_exponent):
        """Instructions differ in whether they take such numbers for zero."""
        x, weight = make(20, 33, 128, "float32")
        x, packed = x * 2.0**x_exponent, pack_weight(weight.unpack() * 2.0**weight_exponent, weight_format)
        whole = extension.linear(x, packed)
        for first, last in ((0, 1), (3, 5), (7, 10), (10, 14), (3, 12)):
            assert torch.equal(extension.linear(x[first:last], packed), whole[first:last])

    def test_in_any_order(self, isa, weight_format):
        x, weight = make(31, 65, 33, weight_format)
        shuffle = torch.randperm(31, generator=torch.Generator().manual_seed(1))
        assert torch.equal(extension.linear(x[shuffle], weight), extension.linear(x, weight)[shuffle])

    @pytest.mark.usefixtures("some_threads")
    def test_at_any_number_of_threads(self, isa, weight_format):
        x, weight = make(13, 200, 40, weight_format)
        results = []
        for num_threads in (1, 2, 3, 5):
            extension.set_num_threads(num_threads)
            results.append(extension.linear(x, weight))
        assert all(torch.equal(result, results[0]) for result in results)

    def test_outputs_do_not_depend_on_those_beside_them(self, isa, weight_format):
        x, weight = make(7, 150, 40, weight_format)
        order = torch.randperm(150, generator=torch.Generator().manual_seed(1))[:77]
        some = PackedWeight.pack(weight.unpack(), "float32", order)
        every = PackedWeight.pack(weight.unpack(), "float32")
        assert torch.equal(extension.linear(x, some), extension.linear(x, every)[:, order])


@pytest.mark.parametrize("weight_format", FORMATS)
class TestValues:
    def test_bias_and_residual_are_added_to_the_product(self, isa, weight_format):
        x, weight = make(9, 50, 40, weight_format)
        bias, residual = torch.randn(50), torch.randn(9, 50)
        product = extension.linear(x, weight)
        assert torch.equal(extension.linear(x, weight, bias=bias), product + bias)
        assert torch.equal(extension.linear(x, weight, residual=residual), product + residual)
        assert torch.equal(extension.linear(x, weight, bias, residual), product + bias + residual)

    def test_rows_that_lie_apart(self, isa, weight_format):
        x, weight = make(9, 50, 40, weight_format)
        wide = torch.full((9, 100), float("nan"))
        wide[:, 3:43] = x
        assert torch.equal(extension.linear(wide[:, 3:43], weight), extension.linear(x, weight))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_what_is_not_finite_shows_in_its_row_and_nowhere_else(self, isa, weight_format, value):
        x, weight = make(9, 50, 70, weight_format)
        finite = extension.linear(x, weight)
        x[4, 69] = value
        got = extension.linear(x, weight)
        others = [row for row in range(9) if row != 4]
        assert torch.equal(got[others], finite[others])
        touched = weight.unpack()[:, 69] != 0  # a zero times infinity is NaN, too, but need not be seen
        assert not got[4, touched].isfinite().any()

    def test_very_small_and_very_large_rows(self, isa, weight_format):
        rows, weight = make(5, 50, 70, weight_format)
        for scale in (0.0, 1e-42, 1e-38, 1e-36, 1e-20, 1e30):
            x = rows * scale
            want, error = reference.linear(x, weight, isa)
            assert_within(extension.linear(x, weight), want, error + 1e-35)

    def test_rows_with_outliers(self, isa, weight_format):
        x, weight = make(5, 50, 70, weight_format)
        x[:, ::7] *= 1e4
        check(x, weight, isa)

    def test_the_largest_magnitudes_do_not_overflow(self, isa, weight_format):
        signs = torch.randint(0, 2, (40, 64), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        weight = pack_weight(torch.cat([signs, torch.ones(1, 64), -torch.ones(1, 64)]), weight_format)
        x = torch.cat([signs[:6], torch.ones(1, 64), -torch.ones(1, 64)])
        check(x, weight, isa)


def test_the_smallest_int8_weights_of_a_file(isa):
    """Q8_0 blocks are -127..127 as llama.cpp writes them, but a file may hold -128: its product must not saturate."""
    scale = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
    blocks = torch.cat([scale, torch.full((32,), -128, dtype=torch.int8).view(torch.uint8)]).repeat(3, 2)
    weight = PackedWeight.allocate(3, 64, "int8")
    weight.fill(blocks, torch.arange(3), "Q8_0")
    assert (weight.unpack() == -64).all()
    x = torch.stack([torch.full((64,), 127.0), torch.full((64,), -127.0)])
    assert extension.linear(x, weight).tolist() == [[-127.0 * 64 * 64] * 3, [127.0 * 64 * 64] * 3]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_show(needs_kernels, weight_format, value):
    for place in (0, 20, 31, 33):
        weight = torch.ones(3, 40)
        weight[1, place] = value
        packed = pack_weight(weight, weight_format)
        assert packed.unpack().isfinite().all(1).tolist() == [True, False, True]
        assert extension.linear(torch.ones(1, 40), packed).isfinite().tolist() == [[True, False, True]]


@pytest.mark.parametrize("is_wide", [False, True])
def test_blocks_with_a_minimum(isa, is_wide):
    """Q4_1 blocks go in as they are, and come out as gguf's own reader says."""
    generator = torch.Generator().manual_seed(5)
    source = torch.randn(37, 96, generator=generator) + torch.randn(37, 1, generator=generator)
    blocks = torch.from_numpy(gguf.quants.quantize(source.numpy(), gguf.GGMLQuantizationType.Q4_1))
    values = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_1))
    weight = PackedWeight.allocate(37, 96, "int4-min", is_wide=is_wide)
    order = torch.randperm(37, generator=generator)
    weight.fill(blocks, order, "Q4_1")
    assert torch.equal(weight.unpack()[order], values)
    assert torch.equal(pack_weight(source, "int4-min").unpack(), values)  # floats are rounded as gguf rounds them
    check(torch.randn(9, 96, generator=generator), weight, isa)


@pytest.mark.parametrize("weight_format", ["int8", "int4", "int4-min"])
def test_wide_activations_are_next_to_exact(isa, weight_format):
    x, weight = make(7, 40, 320, f"{weight_format} wide")
    want = x.double() @ weight.unpack().double().T
    error = ((extension.linear(x, weight) - want).norm() / want.norm()).item()
    assert error < 5e-5
    narrow = make(7, 40, 320, weight_format)[1]
    assert torch.equal(narrow.unpack(), weight.unpack())
    assert error < ((extension.linear(x, narrow) - want).norm() / want.norm()).item() / 100


@pytest.mark.usefixtures("some_threads")
@pytest.mark.parametrize("rows", [1, 9])
def test_a_matrix_without_outputs_gives_none(rows):
    assert extension.linear(*make(rows, 0, 64, "bfloat16")).shape == (rows, 0)


def test_rows_that_lie_far_apart_are_packed_alone(needs_kernels):
    packed = PackedWeight.allocate(1000, 40, "int4")
    packed.fill(torch.ones(3, 40), torch.tensor([999, 17, 400]))
    assert packed.unpack().sum(1).nonzero().flatten().tolist() == [17, 400, 999]


@pytest.mark.slow
def test_a_matrix_of_more_than_two_gigabytes(needs_kernels):
    """Which takes little memory, most of it never being written to."""
    rows, cols = 70_001, 32_800
    packed = PackedWeight.allocate(rows, cols, "int8")
    some = torch.tensor([0, 31_337, rows - 1])
    source = torch.randn(3, cols)
    packed.fill(source, some)
    assert packed.nbytes > 2**31
    want, error = reference.linear(source[:1], PackedWeight.pack(source, "int8"), extension.isa_name())
    got = extension.linear(source[:1], packed)
    assert_within(got[:, some], want, error)
    assert got.count_nonzero() == 3
    torch.testing.assert_close(unpack_rows(packed, some), source, atol=0.05, rtol=0.0)
