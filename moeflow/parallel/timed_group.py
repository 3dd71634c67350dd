"""A group that measures how long this rank waits for the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from moeflow.parallel.group import Group


class TimedGroup(Group):
    """Another group, and the time that its collectives took."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.waited_s = 0.0  # so far, with what copying takes

    @property
    def rank(self) -> int:
        """See `Group`."""
        return self._group.rank

    @property
    def size(self) -> int:
        """See `Group`."""
        return self._group.size

    def all_gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        """See `Group`."""
        with self._timed():
            return self._group.all_gather(name, tensor)

    def all_to_all(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """See `Group`."""
        with self._timed():
            return self._group.all_to_all(name, parts)

    def broadcast_bytes(self, name: str, data: bytes | None) -> bytes:
        """See `Group`."""
        with self._timed():
            return self._group.broadcast_bytes(name, data)

    def barrier(self, name: str) -> None:
        """See `Group`."""
        with self._timed():
            self._group.barrier(name)

    def abort(self, reason: str) -> None:
        """See `Group`."""
        self._group.abort(reason)

    def close(self) -> None:
        """See `Group`."""
        self._group.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - start
