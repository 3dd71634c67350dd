"""Experts of which only some are in memory: those that a pass needs are computed with as they come from disk.

An expert's results for its tokens are computed whenever it is there; a token's results are added up in ascending order
of expert, as the kernels do where all are resident. So neither what was in memory nor what arrived first changes a bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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

_FEW_CHOICES: Final = 2  # of a layer in a pass, as a multiple of its experts


class ExpertPool:
    """The experts of all layers over a few slots."""

    def __init__(
        self,
        cache: ExpertCache,
        slots: PackedExperts,
        prefetch: PrefetchDriver[Any] | None = None,
        slots_of_layers: Sequence[PackedExperts] = (),
    ) -> None:
        """Take a cache and the memory of its slots, seen as experts: slot by slot.

        Where experts of different layers differ in formats, `slots_of_layers` are the same slots as each layer sees
        them.
        """
        self.cache = cache
        self.slots = slots
        self._slots_of_layers = slots_of_layers
        self.prefetch = prefetch
        self.remote: RemoteExperts | None = None  # those of other machines, if there are any
        self.fetcher: DiskReader | None = None  # brings experts while kernels run
        self.stream = ExpertStream(cache)
        self.spanned: Spanned = untraced
        self.num_layers = 0

    @property
    def fetcher_handle(self) -> Any:
        """The fetcher as kernels take it."""
        return None if self.fetcher is None else self.fetcher.handle

    def slots_of(self, layer: int) -> PackedExperts:
        """Return the memory of the slots as a layer sees it; `layer` counts those with experts."""
        return self._slots_of_layers[layer] if self._slots_of_layers else self.slots

    def lend_slots(self, num_layers: int, num_choices: int) -> None:
        """Let kernels bring experts until the end of the pass's call, for so many layers of so many choices each.

        They do not where others compute some of them, nor in a trace, which shows what each layer reads and waits for,
        nor for passes so large that layers will stream.
        """
        if self.fetcher is None or self.remote is not None or self.spanned is not untraced:
            return
        if num_choices <= _FEW_CHOICES * self.cache.num_experts:
            # Of the experts in the order of eviction as many may be passed over: the pass turns out to need them.
            at_most = min(2 * num_layers * num_choices, self.cache.num_slots)
            self.cache.kernel_reads.lend(at_most, max_needed=self.stream.least - 1)

    def add_layer(self, biases: ExpertBiases | None = None) -> CachedExperts:
        """Return the experts of the next layer that has some."""
        self.num_layers += 1
        return CachedExperts(self, self.num_layers - 1, biases)


class CachedExperts:
    """The experts of one layer."""

    def __init__(self, pool: ExpertPool, layer: int, biases: ExpertBiases | None = None) -> None:
        """`layer` counts those with experts."""
        self.pool, self.layer, self.biases = pool, layer, biases
        self.slots = torch.from_numpy(pool.cache.kernel_reads.slot_table)[
            layer
        ]  # [E] int32, as it was when last brought up to date

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's experts plus the residual.

        Shapes: hidden and residual [T, H], topk_ids and topk_weights [T, K] -> [T, H].
        Blocks: until the experts are there. Raises: StorageError if one of them cannot be read.
        """
        work = _Work(self, hidden, topk_ids, topk_weights, residual)
        remote = self.pool.remote
        sent = None if remote is None else remote.send(self.layer, work.experts, hidden, topk_ids, topk_weights)
        if sent is None:
            self._compute_here(work, hidden, topk_ids)
            return work.sums()
        work.leave(sent.experts)
        self._compute_here(work, hidden, topk_ids)
        sent.note_computed_here(work.experts)
        if sent.experts and (missing := self.pool.spanned(WAITS, self.layer, sent.collect, work.pairs)):
            work.experts = missing
            self._compute_here(work, hidden, topk_ids)
        return work.sums()

    def _compute_here(self, work: _Work, hidden: Tensor, topk_ids: Tensor) -> None:
        """Compute with the experts that this process has, or reads."""
        pool = self.pool

        def prefetch() -> None:
            if pool.prefetch is not None:
                pool.prefetch.see(self.layer, hidden, topk_ids)

        if pool.stream.takes(len(work.experts)):
            pool.stream.run(self.layer, work, pool.spanned)
            prefetch()
        else:
            run_leased(pool.cache, self.layer, work, pool.spanned, prefetch)

    def needed(self, topk_ids: Tensor) -> list[int]:
        """Return the experts that have to be there, ascending. Shapes: topk_ids [T, K]."""
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
    """What a layer has to compute: (token, k) pairs, by expert."""

    def __init__(
        self, of: CachedExperts, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None
    ) -> None:
        self._biases = of.biases
        self._slots, self._layer_size = of.pool.slots_of(of.layer), of.pool.cache.num_experts
        self._arguments = (hidden, topk_ids, topk_weights)
        self._residual = residual
        self._sums: Tensor | None = None
        self._pairs: Tensor | None = None
        self.experts = of.needed(topk_ids)  # those of them that are computed here
        self._num_needed = len(self.experts)

    @property
    def pairs(self) -> Tensor:
        """Where the results of pairs go, [T * K, H], until they are added up."""
        if self._pairs is None:
            hidden, topk_ids, _ = self._arguments
            self._pairs = torch.empty(topk_ids.numel(), hidden.shape[1])
        return self._pairs

    def leave(self, experts: Collection[int]) -> None:
        """Leave some experts to others, who write to `pairs`."""
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
