"""Appends trees of drafted tokens to the decodes of a pass, within its capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.request import Request
from moeflow.core.token_tree import NO_TREE, TokenTree
from moeflow.kv.block_tables import BlockTables

KV_RANGE_POSITIONS: Final = 256  # csrc/simd/isa.h has it, too


def with_trees(
    batch: Batch,
    trees: Mapping[Request, TokenTree],
    max_tokens: int,
    blocks: BlockTables,
    num_growing: Callable[[], int],
) -> Batch:
    """Return a batch of at most so many tokens with trees behind its decodes.

    They take blocks, but none of those, `num_growing`, that running requests may need in the next pass.
    """
    budget = max_tokens - batch.num_tokens
    entries = []
    for entry in batch.entries:
        tree = trees.get(entry.request, NO_TREE).first(budget)
        if tree and entry.samples:
            entry = _with_tree(entry, tree, blocks, num_growing())
        budget -= len(entry.tree)
        entries.append(entry)
    return Batch(tuple(entries))


def _with_tree(entry: BatchEntry, tree: TokenTree, blocks: BlockTables, num_growing: int) -> BatchEntry:
    """Return an entry with what of a tree can be of use.

    Its nodes stay within one range of positions that attention sums at once. Their order in it does not change bits.
    And the last token that a request may have is never computed.
    """
    request = entry.request
    num_left = request.max_tokens - len(request.output_token_ids) - 1
    room = blocks.most_tokens(request, keep_available=num_growing) - entry.stop
    tree = tree.up_to_depth(max(num_left, 0)).first(min(room, KV_RANGE_POSITIONS - entry.stop % KV_RANGE_POSITIONS))
    stop = entry.stop + len(tree)
    has_room = blocks.reserve(request, stop)
    assert has_room, "the tree was cut to what there is room for"
    return replace(entry, block_ids=blocks.block_ids(request, stop), tree=tree)
