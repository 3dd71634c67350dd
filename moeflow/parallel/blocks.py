"""How a number of things is cut into one block a rank."""

from __future__ import annotations

from itertools import pairwise


def even_blocks(number: int, num_ranks: int) -> list[range]:
    """Return the numbers from 0 that each rank has: blocks in order, whose sizes differ by one at most."""
    bounds = [rank * number // num_ranks for rank in range(num_ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]
