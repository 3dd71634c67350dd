"""Experts of which only some are in memory: those that a pass needs are computed with as they come from disk.

An expert's results for its tokens are computed whenever it is there; a token's results are added up in ascending order
of expert, as the kernels do where all are resident. So neither what was in memory nor what arrived first changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moeflow.kernels import cpu
from moeflow.kernels.cpu import PackedExperts
from moeflow.layers.spans import WAITS, Spanned, untraced
from moeflow.layers.streamed_experts import ExpertStream
from moeflow.memory.expert_cache import ExpertCache
from moeflow.memory.lease import Lease

# Told of each layer, once the loads it needs are queued or, in a stream, done: (layer, its input [T, H], chosen
# experts [T, K]).
AfterRouting = Callable[[int, Tensor, Tensor], None]


class ExpertPool:
    """The experts of all layers over a few slots."""

    def __init__(self, cache: ExpertCache, slots: PackedExperts, after_routing: AfterRouting | None = None) -> None:
        """Take a cache and the memory of its slots, seen as experts: slot by slot."""
        self.cache = cache
        self.slots = slots
        self.after_routing = after_routing
        self.stream = ExpertStream(cache)
        self.spanned: Spanned = untraced
        self.num_layers = 0

    def add_layer(self) -> CachedExperts:
        """Return the experts of the next layer that has some."""
        self.num_layers += 1
        return CachedExperts(self, self.num_layers - 1)


class CachedExperts:
    """The experts of one layer."""

    def __init__(self, pool: ExpertPool, layer: int) -> None:
        """`layer` counts those with experts."""
        self._pool = pool
        self._layer = layer

    def __call__(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """Return the weighted sum of each token's experts plus the residual.

        Shapes: hidden and residual [T, H], topk_ids and topk_weights [T, K] -> [T, H].
        Blocks: until the experts are there. Raises: StorageError if one of them cannot be read.
        """
        work = _Work(self._pool.slots, hidden, topk_ids, topk_weights)
        if self._pool.stream.takes(len(work.experts)):
            self._pool.stream.run(self._layer, work, self._pool.spanned)
            if self._pool.after_routing is not None:
                self._pool.after_routing(self._layer, hidden, topk_ids)
        else:
            self._run(work, hidden, topk_ids)
        out = work.sums()
        return out if residual is None else torch.add(residual, out)

    def _run(self, work: _Work, hidden: Tensor, topk_ids: Tensor) -> None:
        is_first, spanned = True, self._pool.spanned
        for lease in _leases(self._pool.cache, self._layer, work.experts):
            if is_first and self._pool.after_routing is not None:
                self._pool.after_routing(self._layer, hidden, topk_ids)
            is_first = False
            spanned("experts", self._layer, work.compute, lease.hits, lease)
            arrivals = lease.arriving()
            while (arrived := spanned(WAITS, self._layer, next, arrivals, None)) is not None:
                spanned("experts", self._layer, work.compute, arrived, lease)


def _leases(cache: ExpertCache, layer: int, experts: Sequence[int]) -> Iterator[Lease]:
    """Yield leases on all of the experts; if they do not fit, each portion loads while the one before is computed.

    What is resident comes first then: it would be evicted for the others.
    """
    size = len(experts)
    if size > cache.num_slots:
        size = max(cache.num_slots // 2, 1)
        experts = sorted(experts, key=lambda expert: cache.slot_of(layer, expert) is None)
    held: list[Lease] = []
    try:
        for start in range(0, len(experts), max(size, 1)):
            held.append(cache.acquire(layer, experts[start : start + size]))
            if len(held) == 2:
                yield held[0]
                held.pop(0).release()
        if held:
            yield held[0]
    finally:
        for lease in held:
            lease.release()


class _Work:
    """What a layer has to compute: (token, k) pairs, by expert."""

    def __init__(self, slots: PackedExperts, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        self._slots = slots
        self._hidden = hidden
        self._topk_ids = topk_ids
        self._weights = topk_weights.reshape(-1, 1)
        self._top_k = topk_ids.shape[1]
        self._results = torch.empty(topk_ids.numel(), hidden.shape[1])  # of the pairs
        self._pairs = _pairs_by_expert(topk_ids)
        self.experts = sorted(self._pairs)

    def compute(self, experts: Sequence[int], lease: Lease) -> None:
        """Compute the pairs of experts that are in their slots."""
        if not experts:
            return
        parts = [self._pairs[expert] for expert in experts]
        pairs = torch.cat(parts) if len(parts) > 1 else parts[0]
        slots = torch.tensor([lease.slots[expert] for expert in experts])
        if len(pairs) > len(parts):
            slots = slots.repeat_interleave(torch.tensor([len(part) for part in parts]))
        rows = self._hidden.index_select(0, pairs.div(self._top_k, rounding_mode="floor"))
        results = cpu.experts(rows, self._slots, slots.view(-1, 1), self._weights.index_select(0, pairs))
        self._results.index_copy_(0, pairs, results)

    def sums(self) -> Tensor:
        """Return each token's results added up in ascending order of expert: [T, H]."""
        ranks = self._topk_ids.argsort(dim=1)
        ranks += torch.arange(0, self._topk_ids.numel(), self._top_k).unsqueeze(1)
        out = self._results.index_select(0, ranks[:, 0])
        for k in range(1, self._top_k):
            out += self._results.index_select(0, ranks[:, k])
        return out


def _pairs_by_expert(topk_ids: Tensor) -> dict[int, Tensor]:
    """Return the places of each expert in the flattened topk_ids."""
    ids, order = topk_ids.flatten().sort(stable=True)
    experts, counts = torch.unique_consecutive(ids, return_counts=True)
    return dict(zip(experts.tolist(), torch.split(order, counts.tolist()), strict=True))
