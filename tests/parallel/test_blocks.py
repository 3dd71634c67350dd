"""Blocks cover all numbers once, in order, and none is larger than another by more than one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.parallel.blocks import even_blocks


@given(st.integers(0, 200), st.integers(1, 16))
def test_blocks_are_even_and_in_order(number, num_ranks):
    blocks = even_blocks(number, num_ranks)
    assert [each for block in blocks for each in block] == list(range(number))
    sizes = [len(block) for block in blocks]
    assert len(blocks) == num_ranks
    assert max(sizes) - min(sizes) <= 1
