"""The small operations of the CPU extension, under every instruction set, against float64 and plain definitions."""

import math

import pytest
import torch

from moeflow.kernels.cpu import extension, row_ops
from moeflow.kernels.sample import RowSampling, sample_rows

INF, NAN = math.inf, math.nan
NORM_SHAPES = [(0, 16), (1, 1), (1, 576), (3, 7), (5, 17), (2, 3, 33), (4, 64), (70, 577), (33, 2048)]
LOGIT_SHAPES = [(0, 5), (1, 1), (3, 63), (2, 64), (2, 65), (3, 1000), (1, 49152)]


def in_parts(operation, x):
    """Apply to each row alone, to pairs of rows, and with two threads."""
    alone = [operation(row.clone()) for row in x.split(1)]
    pairs = [operation(pair.clone()) for pair in x.split(2)]
    extension.set_num_threads(2)
    try:
        return [torch.cat(alone), torch.cat(pairs), operation(x)]
    finally:
        extension.set_num_threads(1)


@pytest.mark.parametrize("shape", NORM_SHAPES)
def test_rows_are_divided_by_their_root_mean_square(isa, shape):
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(row_ops.rms_norm(x, weight, 1e-5).double(), want, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("shape", NORM_SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_norm_subtracts_the_mean_first(isa, shape, has_bias):
    x, weight = torch.randn(shape) * 3 + 5, torch.randn(shape[-1])
    bias = torch.randn(shape[-1]) if has_bias else None
    wide = x.double() - x.double().mean(-1, keepdim=True)
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    want = want if bias is None else want + bias
    torch.testing.assert_close(row_ops.layer_norm(x, weight, bias, 1e-5).double(), want, atol=1e-5, rtol=1e-5)


def test_a_layer_norm_far_from_zero(isa):
    x = torch.tensor([4096.0, 4097.0, 4098.0] * 30)  # squares whose difference would be lost
    got = row_ops.layer_norm(x[None], torch.ones(90), None, 0.0)[0]
    torch.testing.assert_close(got[:3], torch.tensor([-1.0, 0.0, 1.0]) * 1.5**0.5, atol=1e-5, rtol=0.0)


def test_a_row_of_zeros_and_one_with_nan(isa):
    x = torch.zeros(3, 40)
    x[1, 39] = NAN
    x[2] = 2.0
    got = row_ops.rms_norm(x, torch.ones(40), 1e-6)
    assert got[0].count_nonzero() == 0
    assert got[1].isnan().all()
    torch.testing.assert_close(got[2], torch.ones(40), atol=1e-6, rtol=0.0)


def test_a_normalised_row_has_the_same_bits_in_any_batch(isa):
    x, weight = torch.randn(120, 577), torch.randn(577)  # enough for several threads
    whole = row_ops.rms_norm(x, weight, 1e-6)
    for got in in_parts(lambda rows: row_ops.rms_norm(rows, weight, 1e-6), x):
        assert torch.equal(got, whole)
    whole = row_ops.layer_norm(x, weight, weight, 1e-6)
    for got in in_parts(lambda rows: row_ops.layer_norm(rows, weight, weight, 1e-6), x):
        assert torch.equal(got, whole)


def test_a_norm_of_another_size_or_type_is_refused(needs_kernels):
    with pytest.raises(ValueError, match=r"\[8\] is needed, not float32 \[7\]"):
        row_ops.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match=r"\[8\] is needed, not float32 \[9\]"):
        row_ops.layer_norm(torch.ones(2, 8), torch.ones(8), torch.ones(9), 1e-6)
    with pytest.raises(ValueError, match="not bfloat16"):
        row_ops.rms_norm(torch.ones(2, 8), torch.ones(8, dtype=torch.bfloat16), 1e-6)


def likeliest(logits):
    return sample_rows(logits, [RowSampling(row) for row in range(len(logits))])


@pytest.mark.parametrize(("num_rows", "size"), LOGIT_SHAPES)
def test_the_maximum_and_its_first_place(isa, num_rows, size):
    x = (torch.randn(num_rows, size) * 4).round()  # with many equals
    assert likeliest(x) == [row.index(max(row)) for row in x.tolist()]


@pytest.mark.parametrize("size", [1, 5, 64, 131])
def test_nan_anywhere_is_the_maximum(isa, size):
    x = torch.randn(size, size)
    x.fill_diagonal_(NAN)
    assert likeliest(x) == [-1] * size


def test_infinities_are_ordered(isa):
    x = torch.full((3, 70), -INF)
    x[1, 69] = -3e38
    x[2, 3] = INF
    assert likeliest(x) == [-1, 69, -1]


def test_other_tensors_are_not_accepted(needs_kernels):
    assert row_ops.accepts(torch.ones(2, 4))
    assert not row_ops.accepts(torch.ones(2, 4, dtype=torch.bfloat16))
    assert not row_ops.accepts(torch.ones(2, 4, dtype=torch.float64))
    assert not row_ops.accepts(torch.ones(2, 4, device="meta"))
    assert not row_ops.accepts(torch.ones(4, 2).T)
