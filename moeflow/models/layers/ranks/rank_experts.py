"""A layer's experts where each of several ranks has some of them: all compute theirs, and exchange the results.

What travels are the weighted results of pairs (token, expert). They are added in ascending order of expert, like the
kernels in one process with all experts. So the bits are the same for any placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from moeflow.core.parallel_config import GATHERED_BYTES
from moeflow.kernels.cpu.expert_slots import SlotExperts, add_pairs
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.models.layers.expert_weights import Destination, ExpertWeights
from moeflow.parallel.blocks import even_blocks
from moeflow.parallel.group import Group
from moeflow.parallel.placement.expert_balancer import ExpertBalancer


class RankExperts(ExpertWeights):
    """This rank's experts of one layer."""

    def __init__(
        self,
        experts: PackedExperts,
        layer: int,
        balancer: ExpertBalancer,
        group: Group,
        gathered_bytes: float = GATHERED_BYTES,
    ) -> None:
        """Take memory for all experts; this rank fills its own; `layer` counts the layers with experts.

        Up to so many bytes of pairs are exchanged at once, and added up by every rank.
        """
        self._gathered_bytes = gathered_bytes
        self._all, self._layer, self._balancer, self._group = experts, layer, balancer, group
        self._name = f"experts of MoE layer {layer}"
        self.expert_bytes = len(experts.storage[0])
        self.place()

    def place(self) -> None:
        """Compute with those experts that the placement gives this rank from now on."""
        self._own = frozenset(self._balancer.placement.held_by(self._group.rank, self._layer))
        # One more than there are: what a pair asks for that another rank computes.
        slots = {expert: expert for expert in self._own}
        self._experts = SlotExperts(self._all, self._all.num_experts + 1, slots, self._all.biases)

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `ExpertWeights`. Blocks: until the other ranks are through, too. Raises: GroupError."""
        pairs, ranks = self._own_pairs(hidden, topk_ids, topk_weights)
        if pairs.nbytes <= self._gathered_bytes:
            self._gather(pairs, ranks)
            return add_pairs(pairs, topk_ids, residual)
        homes = even_blocks(len(hidden), self._group.size)
        return torch.cat(self._group.all_gather(self._name, self._add_at(homes, pairs, ranks, topk_ids, residual)))

    def own_sums(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_tokens: Sequence[int]) -> Tensor:
        """See `SharedExperts`."""
        pairs, ranks = self._own_pairs(hidden, topk_ids, topk_weights)
        homes = [range(*bounds) for bounds in pairwise(accumulate(num_tokens, initial=0))]
        return self._add_at(homes, pairs, ranks, topk_ids, None)

    def _own_pairs(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pairs [T * K, H] that this rank computes, others 0, and the rank of each pair, [T * K]."""
        ranks = torch.from_numpy(self._balancer.serving_ranks(self._layer, topk_ids.numpy()))
        pairs = hidden.new_zeros(topk_ids.numel(), hidden.shape[1])
        own_ids = topk_ids.masked_fill(ranks != self._group.rank, self._all.num_experts)
        self._experts.pairs(hidden, own_ids, topk_weights, pairs)
        return pairs, ranks.view(-1)

    def weights_of(self, expert: int) -> Tensor:
        """Return an expert's memory, [bytes] uint8, whether or not it is this rank's."""
        row: Tensor = self._all.storage[expert][: self.expert_bytes]
        return row

    def parts(self) -> Sequence[tuple[Destination, ...] | None]:
        """Return the parts of this rank's experts; None for those of others."""
        return [parts if expert in self._own else None for expert, parts in enumerate(self._all.parts())]

    def _gather(self, pairs: Tensor, ranks: Tensor) -> None:
        """Fill in the pairs that other ranks have computed."""
        rows = [(ranks == rank).nonzero().view(-1) for rank in range(self._group.size)]
        for rank, found in enumerate(self._group.all_gather(self._name, pairs[rows[self._group.rank]])):
            if rank != self._group.rank:
                pairs[rows[rank]] = found

    def _add_at(
        self, homes: Sequence[range], pairs: Tensor, ranks: Tensor, topk_ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        """Return the sums of this rank's tokens, [own T, H]; `homes` are those of each rank."""
        mine, top_k = self._group.rank, topk_ids.shape[1]
        rows = torch.arange(len(ranks))
        sent = [rows[home.start * top_k : home.stop * top_k] for home in homes]
        own = [part[ranks[part] == mine] for part in sent]
        home = homes[mine]
        start, stop = home.start * top_k, home.stop * top_k
        here, ranks_here = pairs[start:stop], ranks[start:stop]
        for rank, found in enumerate(self._group.all_to_all(self._name, [pairs[part] for part in own])):
            if rank != mine:
                here[ranks_here == rank] = found
        of_home = slice(home.start, home.stop)
        return add_pairs(
            here.contiguous(),
            topk_ids[of_home].contiguous(),
            None if residual is None else residual[of_home].contiguous(),
        )
