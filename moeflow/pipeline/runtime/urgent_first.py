"""The queue of a lane: the most urgent item first, and among equals the one that came first."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class UrgentFirst(Generic[T]):
    """A heap of items. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []  # priority, number, item
        self._numbers = count()

    def put(self, item: T, priority: int) -> None:
        """Add an item; smaller priorities go first."""
        heappush(self._heap, (priority, next(self._numbers), item))

    def take(self) -> T | None:
        """Remove and return the first item; None: there is no item."""
        return heappop(self._heap)[2] if self._heap else None

    def __iter__(self) -> Iterator[T]:
        """Yield all items in no particular order."""
        return (item for _, _, item in self._heap)
