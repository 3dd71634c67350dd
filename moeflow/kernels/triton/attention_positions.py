"""Which positions queries see, and which tiles of positions a program therefore reads. Parts of attention's kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from moeflow.kernels.attention.attention_metadata import TREE_POSITIONS

TREE: tl.constexpr = tl.constexpr(TREE_POSITIONS)


@triton.jit
def tiles_of_splits(start, stop, window, num_splits, has_window: tl.constexpr, has_trees: tl.constexpr, tile_tokens):
    """Return the first tile that a sequence sees, the end of its tiles, and how many of them each split takes."""
    first = 0
    if has_window:  # hidden tokens of a tree move the window back by less than a tree
        first = tl.maximum(start + 1 - window - (TREE if has_trees else 0), 0) // tile_tokens
    end = tl.cdiv(stop, tile_tokens)
    return first, end, tl.cdiv(end - first, num_splits)


@triton.jit
def tiles_of_rows(
    begin, end, first_query, last_query, stop, window, has_window: tl.constexpr, has_trees: tl.constexpr, tile_tokens
):
    """Return the tiles that some rows see as begin, full_begin, full_end and end; all rows see all of the full ones."""
    end = tl.minimum(end, last_query // tile_tokens + 1)
    full_begin = begin
    full_end = (first_query + 1) // tile_tokens
    if has_window:
        reach = window + (TREE if has_trees else 0)
        begin = tl.maximum(begin, tl.maximum(first_query + 1 - reach, 0) // tile_tokens)
        full_begin = tl.cdiv(tl.maximum(last_query + 1 - window, 0), tile_tokens)
    if has_trees:
        full_end = tl.minimum(full_end, tl.maximum(stop - TREE, 0) // tile_tokens)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def own_masks(tree_masks_ptr, tokens, is_row, queries, stop, has_trees: tl.constexpr):
    """Return the tree masks of rows [M] as [M, 1], without bits of positions beyond the query."""
    masks = tl.zeros((tokens.shape[0], 1), tl.int64)
    if has_trees:
        masks = tl.load(tree_masks_ptr + tokens, mask=is_row, other=-1)[:, None]
        bits = (queries - (stop - TREE))[:, None]
        beyond = tl.full(masks.shape, -2, tl.int64) << tl.maximum(bits, 0).to(tl.int64)
        masks = tl.where(bits < 0, 0, masks & ~beyond)
    return masks


@triton.jit
def num_bits(x):
    """Count the set bits of int64 numbers."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    x += x >> 32
    return x & 127


@triton.jit
def visible(queries, keys, masks, tree_begin, window, has_window: tl.constexpr, has_trees: tl.constexpr):
    """Return whether queries at positions [M, 1] see keys at positions [1, N]; masks are `own_masks`."""
    seen = keys <= queries
    if has_trees:
        is_before = keys < tree_begin
        bits = tl.minimum(tl.maximum(keys - tree_begin, 0), TREE - 1).to(tl.int64)
        seen = seen & (is_before | (((masks >> bits) & 1) != 0))
        if has_window:  # the key counts, and all visible positions after it
            num_seen = num_bits(masks & (tl.full(masks.shape, -1, tl.int64) << bits)).to(tl.int32)
            num_seen += tl.where(is_before, tl.minimum(tree_begin, queries + 1) - keys, 0)
            seen = seen & (num_seen <= window)
    elif has_window:
        seen = seen & (keys > queries - window)
    return seen
