"""A layer's experts on three tiers: slots on the GPU, slots in main memory that a disk fills, and the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moeflow.experts.hybrid.hybrid_experts import HostSums, HybridExperts, HybridLayers
from moeflow.experts.hybrid.resident_runs import ResidentRuns
from moeflow.experts.hybrid.slot_tables import NO_SLOT
from moeflow.experts.leased_experts import run_leased
from moeflow.experts.spans import untraced
from moeflow.kernels.cpu.expert_slots import PresentExperts
from moeflow.kernels.expert_biases import ExpertBiases

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from moeflow.experts.cache.lease import Lease
    from moeflow.experts.cached_experts import CachedExperts


class ExpertsOnDisk(HybridExperts):
    """A layer's experts over the slots of a cache. The GPU's experts have no slots there."""

    def slabs(self, experts: Sequence[int], memory: Tensor, *, is_scan: bool) -> Sequence[Tensor]:
        """See `HybridExperts.slabs`. Blocks: while experts are read. Raises: StorageError if one cannot be read."""
        pool = self._pool
        work = _Copies(self.packed.storage, experts, memory)
        if is_scan:
            pool.stream.run(self.layer, work, untraced)
        else:
            run_leased(pool.cache, self.layer, work, untraced, lambda: None)
        return memory.unbind()[: len(experts)]

    def _host_sums(self, layers: HybridLayers, biases: ExpertBiases | None) -> HostSums:
        assert layers.disk is not None
        assert layers.runs is not None
        self._pool = layers.disk
        slots = layers.tables.slots[self.layer]
        return _CachedSums(layers.disk.add_layer(biases), layers.runs, slots, layers.num_joined)


class _CachedSums:
    """The CPU's experts of a layer: at once if all are in memory, else as they arrive."""

    def __init__(
        self, experts: CachedExperts, runs: ResidentRuns, slots_on_gpu: NDArray[np.int32], num_joined: int
    ) -> None:
        """Each token's last `num_joined` choices are parts of the shared expert, on the GPU."""
        self._experts, self._runs, self._slots_on_gpu, self._num_joined = experts, runs, slots_on_gpu, num_joined
        self._table = np.full_like(slots_on_gpu, NO_SLOT)
        self._present = PresentExperts(experts.pool.slots_of(experts.layer), self._table, experts.biases)

    def sums(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> Callable[[], None]:
        """See `HostSums.sums`. The function blocks while experts are read. It raises StorageError."""
        compute, ids = self._present.sums(x, topk_ids, topk_weights, out), topk_ids.numpy()

        def run() -> None:
            is_on_gpu = self._slots_on_gpu != NO_SLOT
            slots = self._runs.slots(self._experts.layer, ids[~is_on_gpu[ids]])
            if slots is None:
                self._read(x, topk_ids, topk_weights, out)
                return
            num_experts = len(slots)
            np.copyto(self._table[:num_experts], np.where(is_on_gpu[:num_experts], NO_SLOT, slots))
            compute()

        return run

    def _read(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        top_k, num_experts = topk_ids.shape[1] - self._num_joined, len(self._slots_on_gpu) - self._num_joined
        topk_ids, topk_weights = topk_ids[:, :top_k].contiguous(), topk_weights[:, :top_k].contiguous()
        on_gpu = np.flatnonzero(self._slots_on_gpu[:num_experts] != NO_SLOT).tolist()
        out.copy_(self._experts.compute_others(x, topk_ids, topk_weights, on_gpu))


class _Copies:
    """Copies experts out of their slots; a `Work`."""

    def __init__(self, slots: Tensor, experts: Sequence[int], memory: Tensor) -> None:
        self.experts = experts
        self._slots = slots
        self._places = dict(zip(experts, memory, strict=False))

    def compute(self, experts: Sequence[int], lease: Lease) -> None:
        """Copy experts that are in their slots."""
        for expert in experts:
            place = self._places[expert]
            place.copy_(self._slots[lease.slots[expert], : len(place)])
