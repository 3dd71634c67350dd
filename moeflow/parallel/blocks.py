"""Which part of a whole each rank has: blocks in order, as even as can be, one a rank; some may be empty.

What kernels read in bands of outputs is cut between bands, so that each rank has whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec

from moeflow.core.attention_config import HeadSizes
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.kernels.weight_format import BAND


def even_blocks(count: int, num_ranks: int) -> list[range]:
    """Return blocks whose sizes differ by one at most."""
    bounds = [rank * count // num_ranks for rank in range(num_ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def band_blocks(num_outputs: int, num_ranks: int) -> list[range]:
    """Return blocks of outputs that begin at a band: all are whole bands, but for the end of the last."""
    bands = even_blocks(-(-num_outputs // BAND), num_ranks)
    return [range(min(it.start * BAND, num_outputs), min(it.stop * BAND, num_outputs)) for it in bands]


def unit_blocks(count: int, num_ranks: int, unit: int) -> list[range]:
    """Return blocks of whole units; there are `count // unit` units."""
    assert count % unit == 0, "refused before"
    return [scaled(block, unit) for block in even_blocks(count // unit, num_ranks)]


class HeadBlocks(msgspec.Struct, frozen=True):
    """The heads of each rank's attention. All its KV heads serve as many of its query heads, which are neighbours."""

    queries: Sequence[range]
    keys: Sequence[range]  # and values; several ranks have the same one where there are more ranks than KV heads

    def owned_keys(self) -> list[range]:
        """Return the KV heads of each rank without heads that an earlier rank has."""
        firsts = [self.keys.index(block) == rank for rank, block in enumerate(self.keys)]
        return [block if is_first else range(0) for block, is_first in zip(self.keys, firsts, strict=True)]


def head_blocks(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadBlocks:
    """Cut attention between KV heads; where there are more ranks than these, some share one, and cut its queries.

    There must be as many query heads as ranks: then each rank has one.
    """
    assert num_ranks <= num_heads
    group = num_heads // num_kv_heads  # query heads of a KV head
    if num_ranks <= num_kv_heads:
        keys = even_blocks(num_kv_heads, num_ranks)
        return HeadBlocks([scaled(block, group) for block in keys], keys)
    sharing = [(head, len(ranks)) for head, ranks in enumerate(even_blocks(num_ranks, num_kv_heads))]
    return HeadBlocks(
        [
            range(head * group + block.start, head * group + block.stop)
            for head, number in sharing
            for block in even_blocks(group, number)
        ],
        [range(head, head + 1) for head, number in sharing for _ in range(number)],
    )


def with_kv_heads_of(shape: ModelConfig, parallel: ParallelConfig | None, rank: int) -> ModelConfig:
    """Return a model whose layers have only those KV heads whose keys and values a rank keeps."""
    if parallel is None or parallel.attention_layout != "tensor":
        return shape
    number = parallel.ranks_per_stage

    def kept(num_kv_heads: int) -> int:
        return len(head_blocks(shape.attention.num_heads, num_kv_heads, number).keys[rank % number])

    def of_rank(heads: HeadSizes | None) -> HeadSizes | None:
        return None if heads is None else replace(heads, num_kv_heads=kept(heads.num_kv_heads))

    kinds = tuple(replace(kind, heads=of_rank(kind.heads)) for kind in shape.attention.layer_kinds)
    return shape.with_fields(num_kv_heads=kept(shape.attention.num_kv_heads), layer_kinds=kinds)


def shape_of_rank(shape: ModelConfig, parallel: ParallelConfig | None) -> ModelConfig:
    """Return a model as large as the part that each of several ranks has, where heads and slices divide evenly."""
    if parallel is None:
        return shape
    number, networks = parallel.num_ranks, shape.feed_forward
    own = with_kv_heads_of(shape, parallel, 0)
    return own.with_fields(
        num_heads=shape.attention.num_heads // number,
        intermediate_size=networks.intermediate_size // number,
        dense_intermediate_size=networks.dense_intermediate_size // number,
    )


def scaled(block: range, factor: int) -> range:
    """Return a block of things that are so many smaller ones each, as a block of these."""
    return range(block.start * factor, block.stop * factor)


def shifted(block: range, start: int) -> range:
    """Return a block of a part as a block of the whole; the part starts at this offset."""
    return range(start + block.start, start + block.stop)
