"""A rank's group, watched: processor time and bytes sent of each section of a layer.

Processor time is this thread's alone, so that ranks that share cores measure what each would take with a core of its
own. Every section begins at a barrier; time spent waiting there counts for none. Within a collective a waiting rank
spins for about 50 microseconds before it sleeps, and these do count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from torch import Tensor

from moeflow.parallel.group import Group

SECTIONS: Final = ("route", "dispatch", "experts", "combine")


class Meter:
    """Collectives of a group, and their cost in each section of one pass."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size
        self.seconds = dict.fromkeys(SECTIONS, 0.0)  # and of other sections that a layout has
        self.sent_bytes = 0  # to others

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time the block, once all ranks have arrived."""
        self.group.barrier(name)
        start_s = time.thread_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - start_s

    def all_gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        """See `Group`."""
        self.sent_bytes += tensor.nbytes * (self.size - 1)
        return self.group.all_gather(name, tensor)

    def all_to_all(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """See `Group`."""
        self.sent_bytes += sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        return self.group.all_to_all(name, parts)


class WallMeter(Meter):
    """A meter of wall time, waits within collectives included. No barrier separates sections."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.seconds = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time the block."""
        start_s = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start_s
