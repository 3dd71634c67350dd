"""Experts that are partly in memory: a layer computes with its experts as they arrive from disk.

An expert's results for its tokens are computed at its arrival. A token's results are added up in ascending order of
expert, as the kernels do for resident experts. So the contents of memory and the order of arrival change no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.lease import Lease
from moeflow.experts.disk_reader import DiskReader
from moeflow.experts.leased_experts import run_leased
from moeflow.experts.prefetch.driver import PrefetchDriver
from moeflow.experts.remote.remote_experts import RemoteExperts
from moeflow.experts.spans import WAITS, Spanned, untraced
from moeflow.experts.streamed_experts import ExpertStream
from moeflow.kernels.cpu.expert_slots import SlotExperts, add_pairs
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_FEW_CHOICES: Final = 2  # of a layer in a pass, as a multiple of the layer's experts


class ExpertPool:
    """The experts of all layers over a few slots."""

    def __init__(
        self,
        cache: ExpertCache,
        slots: PackedExperts,
        prefetch: PrefetchDriver[Any] | None = None,
        slots_of_layers: Sequence[PackedExperts] = (),
    ) -> None:
        """Take a cache and the memory of its slots, viewed as experts.

        If the experts of layers differ in formats, `slots_of_layers` are views of the same slots for each layer.
        """
        self.cache = cache
        self.slots = slots
        self._slots_of_layers = slots_of_layers
        self.prefetch = prefetch
        self.remote: RemoteExperts | None = None  # experts on other machines
        self.fetcher: DiskReader | None = None  # brings experts while kernels run
        self.stream = ExpertStream(cache)
        self.spanned: Spanned = untraced
        self.num_layers = 0

    @property
    def fetcher_handle(self) -> Any:
        """The fetcher as kernels take it."""
        return None if self.fetcher is None else self.fetcher.handle

    def slots_of(self, layer: int) -> PackedExperts:
        """Return the view of the slots for a layer; `layer` counts layers with experts."""
        return self._slots_of_layers[layer] if self._slots_of_layers else self.slots

    def lend_slots(self, num_layers: int, num_choices: int) -> None:
        """Let kernels load experts until the end of their call, for `num_layers` layers of `num_choices` each.

        They do not if other machines compute some experts. In large passes they do not either, since layers stream.
        """
        if self.fetcher is None or self.remote is not None:
            return
        if num_choices <= _FEW_CHOICES * self.cache.num_experts:
            # Twice the need: the pass may turn out to need experts at the front of the order of eviction.
            at_most = min(2 * num_layers * num_choices, self.cache.num_slots)
            self.cache.kernel_reads.lend(at_most, max_needed=self.stream.least - 1)

    def add_layer(self, biases: ExpertBiases | None = None) -> CachedExperts:
        """Return the experts of the next layer that has experts."""
        self.num_layers += 1
        return CachedExperts(self, self.num_layers - 1, biases)


class CachedExperts:
    """The experts of one layer."""

    def __init__(self, pool: ExpertPool, layer: int, biases: ExpertBiases | None = None) -> None:
        """`layer` counts layers with experts."""
        self.pool, self.layer, self.biases = pool, layer, biases
        self.slots = torch.from_numpy(pool.cache.kernel_reads.slot_table)[layer]  # [E] int32, as of the last update

    def compute_others(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, elsewhere: Collection[int]
    ) -> Tensor:
        """Return what `compute` does without the experts `elsewhere`, which another processor adds. Blocks; raises."""
        work = _Work(self, hidden, topk_ids, topk_weights, None)
        work.leave(elsewhere)
        work.pairs.zero_()
        self._compute_here(work, lambda: None)
        return work.sums()

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's experts plus the residual.

        Shapes: hidden and residual [T, H], topk_ids and topk_weights [T, K] -> [T, H].
        Blocks: until the experts are there. Raises: StorageError if one of them cannot be read.
        """
        work = _Work(self, hidden, topk_ids, topk_weights, residual)
        pool, remote = self.pool, self.pool.remote
        sent = None if remote is None else remote.send(self.layer, work.experts, hidden, topk_ids, topk_weights)

        def prefetch() -> None:
            if pool.prefetch is not None:
                pool.prefetch.see(self.layer, hidden, topk_ids)

        if sent is not None:
            work.leave(sent.experts)
        self._compute_here(work, prefetch)
        if sent is not None:
            sent.note_computed_here(work.experts)
            if sent.experts and (missing := pool.spanned(WAITS, self.layer, sent.collect, work.pairs)):
                work.experts = missing
                self._compute_here(work, lambda: None)
        return work.sums()

    def _compute_here(self, work: _Work, on_queued: Callable[[], None]) -> None:
        """Compute with the experts that this process has, or reads. See `run_leased` for `on_queued`."""
        pool = self.pool
        if pool.stream.takes(len(work.experts)):
            pool.stream.run(self.layer, work, pool.spanned)
            on_queued()
        else:
            run_leased(pool.cache, self.layer, work, pool.spanned, on_queued)

    def needed(self, topk_ids: Tensor) -> list[int]:
        """Return the needed experts, ascending. Shapes: topk_ids [T, K]."""
        return sorted(set(topk_ids.flatten().tolist()))

    def parts(self) -> tuple[()]:
        """Return nothing: the cache fills its slots."""
        return ()

    def movable(self) -> None:
        """Return nothing: a slot's expert changes."""

    def for_kernels(self) -> tuple[PackedExperts, Tensor, ExpertBiases | None]:
        """Return the memory of the slots, each expert's slot, [E] int32, and the layer's biases."""
        return self.pool.slots_of(self.layer), self.slots, self.biases


class _Work:
    """The computation of a layer: (token, k) pairs, by expert."""

    def __init__(
        self, of: CachedExperts, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None
    ) -> None:
        self._biases = of.biases
        self._slots, self._layer_size = of.pool.slots_of(of.layer), of.pool.cache.num_experts
        self._arguments = (hidden, topk_ids, topk_weights)
        self._residual = residual
        self._sums: Tensor | None = None
        self._pairs: Tensor | None = None
        self.experts = of.needed(topk_ids)  # computed on this machine
        self._num_needed = len(self.experts)

    @property
    def pairs(self) -> Tensor:
        """The results of pairs, [T * K, H], until they are added up."""
        if self._pairs is None:
            hidden, topk_ids, _ = self._arguments
            self._pairs = torch.empty(topk_ids.numel(), hidden.shape[1])
        return self._pairs

    def leave(self, experts: Collection[int]) -> None:
        """Leave some experts to other machines, whose results go to `pairs`."""
        self.experts = [expert for expert in self.experts if expert not in experts]

    def compute(self, experts: Sequence[int], lease: Lease) -> None:
        """Compute the pairs of experts that are in their slots."""
        if not experts:
            return
        slots = {expert: lease.slots[expert] for expert in experts}
        in_slots = SlotExperts(self._slots, self._layer_size, slots, self._biases)
        if len(experts) == self._num_needed:
            self._sums = in_slots.sums(*self._arguments, self._residual)
            return
        in_slots.pairs(*self._arguments, self.pairs)

    def sums(self) -> Tensor:
        """Return each token's results added up in ascending order of expert, plus the residual: [T, H]."""
        if self._sums is None:
            self._sums = add_pairs(self.pairs, self._arguments[1], self._residual)
        return self._sums
