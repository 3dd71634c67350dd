"""The table of formats is true of what the extension does, and complete: every row is held to the same promises."""

import pytest
import torch

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedWeight, matrix_bytes
from moeflow.kernels.weight_format import ALL_FORMATS, BLOCK_KINDS, FORMATS, MADE_FORMATS, MIXES, WEIGHT_FORMATS
from tests.kernels.blocks import random_blocks, values_of

KEPT = [(name, stored) for name in ALL_FORMATS for stored in sorted(FORMATS[name].keeps)]
needs_extension = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


def test_every_name_has_a_record():
    assert tuple(FORMATS) == ALL_FORMATS


def test_what_is_read_is_kept_by_some_format():
    assert {stored for _, stored in KEPT} == {*BLOCK_KINDS, "bfloat16"}


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_other_formats_that_a_record_names(name):
    record, bits = FORMATS[name], FORMATS[name].bits_per_value
    assert (record.wider is None) == (name == "float32")
    assert record.wider is None or FORMATS[record.wider].bits_per_value > bits or record.option is None
    assert record.smaller is None or FORMATS[record.smaller].bits_per_value < bits
    assert record.smaller is None or record.smaller in (*WEIGHT_FORMATS, *MIXES)


@needs_extension
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_bits_are_those_of_packed_bytes(name):
    rows, cols = 32, 2048
    assert matrix_bytes(name, rows, cols) * 8 == FORMATS[name].bits_per_value * rows * cols


@needs_extension
@pytest.mark.parametrize("name", MADE_FORMATS)
def test_floats_come_back_as_far_as_bits_reach(name):
    source = torch.randn(37, 96)
    values = PackedWeight.pack(source, name).unpack()
    assert (values - source).norm() <= 2 ** -(FORMATS[name].bits_per_value / 2) * source.norm()
    assert torch.equal(PackedWeight.pack(values, name).unpack(), values)


@needs_extension
@pytest.mark.parametrize(("name", "stored"), KEPT)
def test_what_a_format_keeps_does_not_change(name, stored):
    weight = PackedWeight.allocate(37, 256, name)
    order = torch.randperm(37)
    if stored in BLOCK_KINDS:
        blocks = random_blocks(stored, 37, 256)
        weight.fill(blocks, order, stored)
        values = values_of(stored, blocks)
    else:
        values = torch.randn(37, 256).to(getattr(torch, stored))
        weight.fill(values, order)
    assert torch.equal(weight.unpack()[order], values.float())


@needs_extension
def test_names_that_nobody_knows():
    with pytest.raises(ValueError, match="unknown weight format: int3"):
        matrix_bytes("int3", 1, 32)
    weight = PackedWeight.allocate(1, 32, "int8")
    with pytest.raises(ValueError, match="unknown type of weights in a file: Q3_0"):
        weight.fill(torch.zeros(1, 14, dtype=torch.uint8), torch.arange(1), "Q3_0")


@needs_extension
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_rows_that_are_no_whole_blocks(kind):
    weight = PackedWeight.allocate(1, 33, "float32")
    with pytest.raises(ValueError, match=f"rows of 33 values are no whole {kind} blocks"):
        weight.fill(torch.zeros(1, 34, dtype=torch.uint8), torch.arange(1), kind)
