"""How many sequences each process of a server has under way. All map the same memory, so that each knows the sum."""

from __future__ import annotations

import mmap

_COUNT_BYTES = 8


class Occupancy:
    """The counts of a server's processes; one of them is this process's own."""

    def __init__(self, memory: bytearray | mmap.mmap | None = None, place: int = 0) -> None:
        """`place` is that of this process. Without memory, it is the only one."""
        self._counts = memoryview(bytearray(_COUNT_BYTES) if memory is None else memory).cast("q")
        self._place = place

    @classmethod
    def mapped(cls, descriptor: int, place: int) -> Occupancy:
        """Return that of a server with several processes. `descriptor` is of zeroed memory and stays open."""
        return cls(mmap.mmap(descriptor, 0), place)

    @property
    def total(self) -> int:
        """Of all processes."""
        return sum(self._counts)

    def add(self, number: int) -> None:
        """Count sequences of this process in, or out if negative."""
        self._counts[self._place] += number

    def clear(self, place: int) -> None:
        """The process there has ended."""
        self._counts[place] = 0
