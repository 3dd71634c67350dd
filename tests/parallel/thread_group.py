"""Ranks as threads of one process: a group whose collectives pass tensors through a list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

TIMEOUT_S = 30.0


class _Shared:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.slots: list[Any] = [None] * size


class ThreadGroup:
    """One rank's view."""

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank, self.size, self._shared = rank, size, shared
        self.sent_bytes = 0  # to others

    def all_gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        self.sent_bytes += tensor.nbytes * (self.size - 1)
        return [found.clone() for found in self._exchange((name, tensor.contiguous()))]

    def all_to_all(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        self.sent_bytes += sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        return [found[self.rank].clone() for found in self._exchange((name, list(parts)))]

    def barrier(self, name: str) -> None:
        self._exchange((name, None))

    def _exchange(self, given: tuple[str, Any]) -> list[Any]:
        self._shared.slots[self.rank] = given
        self._shared.barrier.wait()
        found = list(self._shared.slots)
        assert len({name for name, _ in found}) == 1, "ranks are in different collectives"
        self._shared.barrier.wait()
        return [value for _, value in found]


def run_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Return what each rank's work returns."""
    shared = _Shared(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, [ThreadGroup(rank, size, shared) for rank in range(size)]))
