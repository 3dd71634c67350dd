"""Streams layers that need nearly all their experts through a window of slots, so that the disk is always busy.

A pass over all layers needs more experts than there are slots. A layer computes with experts as they arrive, and each
computed expert makes a slot free for the next read. Soon these reads belong to the next layer: it needs nearly all its
experts, which is known before its router runs. Meanwhile, the layer computes with experts that earlier passes left in
memory. So reads and computation overlap over the whole pass.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.lease import Lease
from moeflow.experts.leased_experts import Work, compute_leased
from moeflow.experts.spans import EXPERTS, Spanned

NEARLY_ALL: Final = 0.75  # of a layer's experts; with fewer, many prefetches for the next layer would be useless
_LARGEST_WINDOW: Final = 32  # slots: under read, arrived, or in use
_PORTION: Final = 4  # experts computed at once: fewer are slow, more hold their slots longer


class ExpertStream:
    """Runs the experts of layers in order."""

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache

    @property
    def _window(self) -> int:
        """The number of slots that stream; the others keep their experts."""
        num_slots = self._cache.num_slots  # may change from pass to pass
        return min(max(num_slots // 4, 2), num_slots, _LARGEST_WINDOW)

    @property
    def least(self) -> int:
        """The least number of needed experts from which a layer streams."""
        return math.ceil(NEARLY_ALL * self._cache.num_experts)

    def takes(self, num_needed: int) -> bool:
        """Return whether a layer that needs `num_needed` experts streams."""
        return num_needed >= self.least

    def run(self, layer: int, work: Work, spanned: Spanned) -> None:
        """Compute with all needed experts of a layer. Blocks. Raises: StorageError if one cannot be read."""
        cache, window = self._cache, self._window
        found = cache.layer_scan.at(layer, work.experts, window=window)
        num_kept = min(len(found.kept), cache.num_slots - window)
        waiting = deque(self._portions([*found.read_ahead, *found.kept[num_kept:], *found.absent]))
        kept = deque(self._portions(found.kept[:num_kept]))
        leases = _Leases(cache, layer)
        try:
            hits = leases.take(found.kept[:num_kept])
            streamed: deque[Lease] = deque()
            while kept or streamed or waiting:
                self._read_on(leases, streamed, waiting)
                if kept and not (streamed and streamed[0].is_complete):
                    spanned(EXPERTS, layer, work.compute, kept.popleft(), hits)
                    continue
                lease = streamed.popleft()
                _compute(layer, lease, work, spanned)
                leases.give_back(lease)
        finally:
            leases.give_back_all()

    def _portions(self, experts: Sequence[int]) -> list[Sequence[int]]:
        size = min(max(self._window // 4, 1), _PORTION)
        return [experts[start : start + size] for start in range(0, len(experts), size)]

    def _read_on(self, leases: _Leases, streamed: deque[Lease], waiting: deque[Sequence[int]]) -> None:
        """Fill the window with experts of this layer, then of the next ones."""
        room = self._window - sum(len(lease.slots) for lease in streamed)
        while waiting and (len(waiting[0]) <= room or not streamed):
            portion = waiting.popleft()
            streamed.append(leases.take(portion))
            room -= len(portion)
        if not waiting:
            self._cache.layer_scan.read_ahead(room)


class _Leases:
    """The leases of a layer, which end even after an error."""

    def __init__(self, cache: ExpertCache, layer: int) -> None:
        self._cache = cache
        self._layer = layer
        self._held: list[Lease] = []

    def take(self, experts: Sequence[int]) -> Lease:
        lease = self._cache.acquire(self._layer, experts)
        self._held.append(lease)
        return lease

    def give_back(self, lease: Lease) -> None:
        self._held.remove(lease)
        lease.release()

    def give_back_all(self) -> None:
        for lease in self._held:
            lease.release()


def _compute(layer: int, lease: Lease, work: Work, spanned: Spanned) -> None:
    """Compute with a portion: at once if it is resident, otherwise as it arrives."""
    if lease.is_complete:
        lease.wait()  # raises errors at once
        spanned(EXPERTS, layer, work.compute, list(lease.slots), lease)
        return
    compute_leased(layer, lease, work, spanned)
