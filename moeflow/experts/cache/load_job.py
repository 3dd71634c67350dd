"""An expert on its way into a slot, between the cache that requests it and the reader that loads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class LoadHandle(Protocol):
    """A load that was requested."""

    def cancel(self) -> bool:
        """Take it back if it has not begun: then return True, and nothing is called for it."""


@dataclass(slots=True, eq=False)
class LoadJob:
    """One load. The cache writes all fields."""

    expert: int  # its number over all layers, as in the file
    slot: int
    is_prefetch: bool  # no pass waited for it when it started
    is_joined: bool = False  # by now one does, though it is a prefetch
    is_done: bool = False  # well or badly; never if it is cancelled
    error: Exception | None = None
    handle: LoadHandle | None = None  # None until it is started


OnDone = Callable[[LoadJob, Exception | None], None]

# Starts loads, all prefetches or none, and returns at once. `OnDone` is called once for each that the cache does not
# cancel: from another thread, or from within if it fails at once.
StartLoads = Callable[[Sequence[LoadJob], OnDone], Sequence[LoadHandle]]
