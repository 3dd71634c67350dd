"""A model allocates memory in the order of the file: blocks from page to page, experts layer by layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.checkpoint.packed.weight_memory import FreshMemory, LaidOutMemory, NotedMemory


@given(sizes=st.lists(st.integers(0, 3 * PAGE_BYTES), max_size=12))
def test_what_was_noted_is_what_the_blocks_take_laid_out(sizes):
    noted = NotedMemory()
    assert [noted.block(size).nbytes for size in sizes] == sizes
    whole = torch.zeros(noted.num_bytes, dtype=torch.uint8)
    laid_out = LaidOutMemory(whole, is_filled=True)
    end = 0
    for size in sizes:
        block = laid_out.block(size)
        assert block.nbytes == size
        start = block.storage_offset()
        assert start % PAGE_BYTES == 0
        assert 0 <= start - end < PAGE_BYTES
        end = start + size
    assert noted.num_bytes - end < PAGE_BYTES or not sizes


def test_more_than_there_is_cannot_be_had():
    memory = LaidOutMemory(torch.zeros(2 * PAGE_BYTES, dtype=torch.uint8), is_filled=True)
    memory.block(PAGE_BYTES + 1)
    with pytest.raises(ValueError, match="more than the 8192 bytes"):
        memory.block(1)


def test_experts_come_layer_by_layer():
    slabs = torch.arange(2 * 3 * 8, dtype=torch.uint8).view(2, 3, 8)
    memory = LaidOutMemory(torch.zeros(0, dtype=torch.uint8), slabs, is_filled=True)
    assert torch.equal(memory.experts(3, 5), slabs[0])
    assert torch.equal(memory.experts(3, 8), slabs[1])
    with pytest.raises(ValueError, match="not layer 2 of the slabs"):
        memory.experts(3, 8)


@pytest.mark.parametrize("wish", [(4, 8), (3, 9)])
def test_other_experts_than_there_are_cannot_be_had(wish):
    slabs = torch.zeros(2, 3, 8, dtype=torch.uint8)
    memory = LaidOutMemory(torch.zeros(0, dtype=torch.uint8), slabs, is_filled=True)
    with pytest.raises(ValueError, match="not layer 0"):
        memory.experts(*wish)


def test_experts_may_be_kept_elsewhere():
    assert FreshMemory().experts(3, 8).shape == (3, 8)
    assert NotedMemory().experts(3, 8) is None
    assert LaidOutMemory(torch.zeros(0, dtype=torch.uint8), is_filled=False).experts(3, 8) is None
