"""A layer's experts where several ranks have a block of them each: all compute theirs, and exchange the results.

What travels are the weighted results of pairs (token, expert). They are added up in ascending order of expert, as the
kernels do where one process has all experts, so that the results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from moeflow.core.units import KIB
from moeflow.kernels.cpu.expert_slots import SlotExperts, add_pairs
from moeflow.kernels.cpu.packed_weights import PackedExperts
from moeflow.models.layers.expert_weights import Destination, ExpertWeights
from moeflow.parallel.blocks import even_blocks
from moeflow.parallel.group import Group

GATHERED_BYTES: Final = 256 * KIB  # of pairs up to which each rank adds up all of them: one exchange instead of two


class RankExperts(ExpertWeights):
    """One layer's experts, of which this rank has a block."""

    def __init__(self, own: PackedExperts, num_experts: int, group: Group, name: str) -> None:
        """Take this rank's block of the experts; `name` is the layer's, for errors."""
        blocks = even_blocks(num_experts, group.size)
        self._own, self._group, self._name, self._num_experts = own, group, name, num_experts
        self._block = blocks[group.rank]
        self._slots = {expert: slot for slot, expert in enumerate(self._block)}
        self._experts = SlotExperts(own, num_experts)
        self._rank_of = torch.tensor([rank for rank, block in enumerate(blocks) for _ in block])

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `ExpertWeights`. Blocks: until the other ranks are through, too. Raises: GroupError."""
        pairs = hidden.new_zeros(topk_ids.numel(), hidden.shape[1])
        self._experts.pairs(hidden, topk_ids, topk_weights, self._slots, pairs)
        ranks = self._rank_of[topk_ids].view(-1)  # of each pair
        if pairs.nbytes <= GATHERED_BYTES:
            self._gather(pairs, ranks)
            return add_pairs(pairs, topk_ids, residual)
        return self._add_at_home(pairs, ranks, topk_ids, residual)

    def parts(self) -> Sequence[tuple[Destination, Destination, Destination] | None]:
        """Return the parts of this rank's experts; None for those of others."""
        own = dict(zip(self._block, self._own.parts(), strict=True))
        return [own.get(expert) for expert in range(self._num_experts)]

    def _gather(self, pairs: Tensor, ranks: Tensor) -> None:
        """Fill in the pairs that other ranks have computed."""
        rows = [(ranks == rank).nonzero().view(-1) for rank in range(self._group.size)]
        for rank, found in enumerate(self._group.all_gather(self._name, pairs[rows[self._group.rank]])):
            if rank != self._group.rank:
                pairs[rows[rank]] = found

    def _add_at_home(self, pairs: Tensor, ranks: Tensor, topk_ids: Tensor, residual: Tensor | None) -> Tensor:
        """Have each rank add up a share of the tokens, and return the sums of all. Shapes: as `compute`."""
        size, mine = self._group.size, self._group.rank
        num_tokens, top_k = topk_ids.shape
        homes = even_blocks(num_tokens, size)  # tokens are cut into blocks in the same way
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
        sums = add_pairs(
            here.contiguous(),
            topk_ids[of_home].contiguous(),
            None if residual is None else residual[of_home].contiguous(),
        )
        return torch.cat(self._group.all_gather(self._name, sums))
