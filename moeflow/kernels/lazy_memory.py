"""Zeroed memory that costs nothing until it is touched, and that can be given back."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import address
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


ALIGNMENT = 64  # bytes, as kernels want it
_HUGE_PAGE = 2 * 1024**2
_COLLAPSE: Final = 25  # MADV_COLLAPSE, which Python does not name: Linux 6.1 and later


class LazyMemory:
    """Zeros in main memory, aligned. Large arrays get their pages on first use."""

    def __init__(self, num_bytes: int, *, huge_pages: bool = True) -> None:
        """Reserve it. `huge_pages`: 2 MiB at a time, but for the rest at the end; else the smallest there are.

        Raises: MemoryError if the system refuses that much.
        """
        self._mapping: mmap.mmap | None = None
        self._start = 0  # of the array in the mapping
        if num_bytes < _HUGE_PAGE:
            buffer = np.zeros(num_bytes + ALIGNMENT, np.uint8)
            start = -address(buffer) % ALIGNMENT
        else:
            self._mapping = _map(num_bytes + _HUGE_PAGE)
            buffer = np.frombuffer(self._mapping, np.uint8)
            start = self._start = -address(buffer) % _HUGE_PAGE
            advise_huge_pages(self._mapping, start, _whole_pages(num_bytes) if huge_pages else 0)
        self.bytes: NDArray[np.uint8] = buffer[start : start + num_bytes]  # [num_bytes]

    @property
    def tensor(self) -> Tensor:
        """The memory as torch sees it: [num_bytes] uint8."""
        return torch.from_numpy(self.bytes)

    def enlarge_pages(self, touched: Iterable[range]) -> None:
        """Use pages of 2 MiB from now on, as with `huge_pages`, and move the `touched` part to such pages.

        If the system does not move it at once, it does so later.
        """
        if self._mapping is None:
            return
        num_bytes = _whole_pages(self.bytes.nbytes)
        advise_huge_pages(self._mapping, self._start, num_bytes)
        for part in touched:
            first = part.start // _HUGE_PAGE * _HUGE_PAGE
            length = min(-(-part.stop // _HUGE_PAGE) * _HUGE_PAGE, num_bytes) - first
            if part and length > 0:
                with contextlib.suppress(OSError):
                    self._mapping.madvise(_COLLAPSE, self._start + first, length)

    def give_back(self, start: int, stop: int) -> None:
        """Return the pages that lie wholly between two offsets to the system: they are zeros again, and free.

        Does nothing where memory is too small to be taken by pages.
        """
        if self._mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        page = mmap.PAGESIZE
        first = -(-(self._start + start) // page) * page
        end = (self._start + stop) // page * page
        if end > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, end - first)


def advise_huge_pages(mapping: mmap.mmap, start: int, num_bytes: int) -> None:
    """Have so many bytes from `start` on lie on huge pages and the rest on small ones, if the system has both."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    with contextlib.suppress(OSError):  # built without huge pages: then all are small
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
        if num_bytes:
            mapping.madvise(mmap.MADV_HUGEPAGE, start, num_bytes)


def allocate_lazily(num_bytes: int) -> Tensor:
    """Return zeros [num_bytes] uint8 in main memory, aligned; large ones on huge pages, taken when touched.

    Raises: MemoryError if the system refuses that much.
    """
    return LazyMemory(num_bytes).tensor


def _whole_pages(num_bytes: int) -> int:
    """Return how many bytes of the beginning can lie on huge pages."""
    return num_bytes // _HUGE_PAGE * _HUGE_PAGE


def _map(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:  # the latter beyond what an address can hold
        raise MemoryError(f"{num_bytes - _HUGE_PAGE} bytes cannot be had") from error
