"""Numbers of sequences whose decode passes a GPU starts as one CUDA graph."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes that hold passes of up to so many sequences; the largest one holds no more than 64."""
    return SIZES[: bisect_left(SIZES, max_num_seqs) + 1]
