"""Operations of one request's attention with and without a KV cache. Source: ExpertFlow (thesis), 4.25-4.28.

The thesis counts per head: projections of query, key, value and output, two products with all positions, and four
operations a score for the softmax. Its equation 4.28 is not the saving that 4.26 asks for. From the second step on, it
adds the cache's costs where 4.26 subtracts them. That is 2.5% too much for its example (16 heads of 64, 1024 wide).
"""

from __future__ import annotations


def attention_flops(num_new: int, length: int, *, num_heads: int, head_dim: int, width: int) -> int:
    """Return the operations of a layer for `num_new` tokens at a total `length` (4.25); without a cache all are new."""
    return 4 * num_heads * num_new * (length + head_dim * (2 * width + length))


def flops_saved(start: int, end: int, *, num_heads: int, head_dim: int, width: int) -> int:
    """Return what the cache saves a layer from a prompt of `start` tokens to a total of `end` (4.26)."""
    squares = end**2 + end * start + start**2 - 1
    inner = head_dim * (3 * width * (end + start - 1) + squares) + squares
    return 4 * num_heads * (end - start) * inner // 3


def flops_saved_as_published(start: int, end: int, *, num_heads: int, head_dim: int, width: int) -> int:
    """Return equation 4.28 as printed: the sum of the costs of all later steps without and with a cache."""
    squares = end**2 + end * (start + 3) + start**2 + 3 * start + 2
    inner = head_dim * (3 * width * (end + start + 3) + squares) + squares
    return 4 * num_heads * (end - start) * inner // 3
