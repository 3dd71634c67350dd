"""Blocks cover the whole in order, evenly; blocks of heads keep queries with their keys."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.attention_config import AttentionKind, HeadSizes
from moeflow.core.parallel_config import ParallelConfig
from moeflow.parallel.blocks import band_blocks, even_blocks, head_blocks, shifted, with_kv_heads_of
from tests.shapes import TINY

RANKS = st.integers(1, 16)


def joined(blocks):
    return [number for block in blocks for number in block]


@given(st.integers(0, 200), RANKS)
def test_even_blocks_cover_all_in_order_and_differ_by_one_at_most(count, num_ranks):
    blocks = even_blocks(count, num_ranks)
    assert joined(blocks) == list(range(count))
    assert len(blocks) == num_ranks
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 500), RANKS)
def test_blocks_of_bands_cover_all_in_order_and_begin_at_bands(count, num_ranks):
    blocks = band_blocks(count, num_ranks)
    assert joined(blocks) == list(range(count))
    assert len(blocks) == num_ranks
    assert all(block.start % 16 == 0 for block in blocks if block)
    bands = [-(-len(block) // 16) for block in blocks]
    assert max(bands) - min(bands) <= 1


@given(st.integers(1, 12), st.integers(1, 8), st.data())
def test_each_rank_has_query_heads_and_just_the_keys_that_serve_them(kv_heads, group, data):
    num_ranks = data.draw(st.integers(1, kv_heads * group))
    blocks = head_blocks(kv_heads * group, kv_heads, num_ranks)
    assert joined(blocks.queries) == list(range(kv_heads * group))
    assert joined(blocks.owned_keys()) == list(range(kv_heads))
    for queries, keys in zip(blocks.queries, blocks.keys, strict=True):
        assert len(queries) > 0
        assert len(queries) % len(keys) == 0
        share = len(queries) // len(keys)  # as kernels pair them
        assert [query // group for query in queries] == [key for key in keys for _ in range(share)]
    if num_ranks >= kv_heads:
        assert {len(keys) for keys in blocks.keys} == {1}


def test_a_block_of_a_part_is_found_in_the_whole():
    assert shifted(range(3, 5), 10) == range(13, 15)


def test_a_rank_keeps_the_keys_of_its_heads_alone():
    shape = TINY.with_fields(num_heads=10, num_kv_heads=5)
    cut = ParallelConfig(num_ranks=2, attention_layout="tensor")
    assert [with_kv_heads_of(shape, cut, rank).attention.num_kv_heads for rank in range(2)] == [2, 3]
    assert with_kv_heads_of(shape, replace(cut, attention_layout="replicated"), 1) == shape
    assert with_kv_heads_of(shape, None, 0) == shape


def test_a_rank_keeps_of_each_layer_the_keys_of_its_own_heads():
    kinds = [AttentionKind(None, None, heads) for heads in (None, HeadSizes(2, 16, values_are_keys=True))]
    shape = TINY.with_fields(num_heads=6, num_kv_heads=6, head_dim=8, num_layers=2, layer_kinds=tuple(kinds))
    cut = ParallelConfig(num_ranks=3, attention_layout="tensor")
    for rank in range(3):
        own = with_kv_heads_of(shape, cut, rank)
        assert own.attention.heads_of(0) == HeadSizes(2, 8)
        assert own.attention.heads_of(1) == HeadSizes(1, 16, values_are_keys=True)  # which some ranks share
