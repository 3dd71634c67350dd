"""Zeroed memory that costs nothing until it is touched."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, as kernels want it
_HUGE_PAGE = 2 * 1024**2


def allocate_lazily(num_bytes: int) -> Tensor:
    """Return zeros [num_bytes] uint8 in main memory, aligned; large ones on huge pages, taken when touched.

    Raises: MemoryError if the system refuses that much.
    """
    if num_bytes < _HUGE_PAGE:
        buffer = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8)
        start = -buffer.data_ptr() % ALIGNMENT
    else:
        try:
            mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:  # the latter beyond what an address can hold
            raise MemoryError(f"{num_bytes} bytes cannot be had") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(mapping, dtype=torch.uint8)
        start = -buffer.data_ptr() % _HUGE_PAGE
    return buffer[start : start + num_bytes]
