"""Computes with the experts of a layer under leases: resident experts first, then each as it arrives from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.lease import Lease
from moeflow.experts.spans import EXPERTS, WAITS, Spanned


class Work(Protocol):
    """The computation of a layer."""

    @property
    def experts(self) -> Sequence[int]:
        """The needed experts, ascending."""

    def compute(self, experts: Sequence[int], lease: Lease, /) -> None:
        """Compute with some of the experts, which are in their slots."""


def run_leased(cache: ExpertCache, layer: int, work: Work, spanned: Spanned, on_queued: Callable[[], None]) -> None:
    """Compute with all experts of a layer; `on_queued` is called once the first loads are queued.

    Blocks: until the experts are there. Raises: StorageError if one of them cannot be read.
    """
    if not work.experts:  # other machines compute them
        on_queued()
        return
    for number, lease in enumerate(_leases(cache, layer, work.experts)):
        if number == 0:
            on_queued()
        compute_leased(layer, lease, work, spanned)


def compute_leased(layer: int, lease: Lease, work: Work, spanned: Spanned) -> None:
    """Compute with the resident experts of a lease, then with the others as they arrive."""
    spanned(EXPERTS, layer, work.compute, lease.hits, lease)
    arrivals = lease.arriving()
    while (arrived := spanned(WAITS, layer, next, arrivals, None)) is not None:
        spanned(EXPERTS, layer, work.compute, arrived, lease)


def _leases(cache: ExpertCache, layer: int, experts: Sequence[int]) -> Iterator[Lease]:
    """Yield one lease or more. If the experts do not fit, each portion loads while the previous one computes.

    Resident experts come first then, since the others would evict them.
    """
    size = len(experts)
    if size > cache.num_slots:
        size = max(cache.num_slots // 2, 1)
        experts = sorted(experts, key=lambda expert: cache.slot_of(layer, expert) is None)
    held: list[Lease] = []
    try:
        for start in range(0, len(experts), size):
            held.append(cache.acquire(layer, experts[start : start + size]))
            if len(held) == 2:
                yield held[0]
                held.pop(0).release()
        yield held[0]
    finally:
        for lease in held:
            lease.release()
