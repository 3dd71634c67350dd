"""Lets several micro-batches of a pass take turns on one team of threads: while one waits, another computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class ComputeLock:
    """What the one thread has that computes. Kernels share workspaces: two that compute at once gain nothing."""

    def __init__(self) -> None:
        self.idle_s = 0.0  # no thread computed, because all were waiting; only grows
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._freed_s = 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have the baton in the block. Blocks: until no other thread has it."""
        self._take()
        try:
            yield
        finally:
            self._free()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Release the lock inside the block, where this thread does not compute. Blocks: at its end as `computing`
        does.

        A thread that computes without the baton, as who drafts tokens between two passes, waits alone.
        """
        if self._holder != threading.get_ident():
            start_s = time.perf_counter()
            yield
            self.idle_s += time.perf_counter() - start_s
            return
        self._free()
        try:
            yield
        finally:
            self._take()
            self.idle_s += time.perf_counter() - self._freed_s

    def _take(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def _free(self) -> None:
        self._holder = None
        self._freed_s = time.perf_counter()
        self._lock.release()
