"""The load of an expert, shared by the cache that requests it and the reader that performs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class LoadHandle(Protocol):
    """A requested load."""

    def cancel(self) -> bool:
        """Cancel the load if it has not begun; return whether it was cancelled. A cancelled load reports nothing."""


@dataclass(slots=True, eq=False)
class LoadJob:
    """One load. The cache writes all fields."""

    expert: int  # its number over all layers, as in the file
    slot: int
    is_prefetch: bool  # no pass waited for it when it started
    is_joined: bool = False  # a prefetch that a pass waits for by now
    is_done: bool = False  # with or without an error; never if it is cancelled
    error: Exception | None = None
    handle: LoadHandle | None = None  # from its start on


OnDone = Callable[[LoadJob, Exception | None], None]

# Starts loads, either all prefetches or none, and returns at once. `OnDone` is called once for each load that the cache
# does not cancel: from another thread, or from within if the load fails at once.
StartLoads = Callable[[Sequence[LoadJob], OnDone], Sequence[LoadHandle]]
