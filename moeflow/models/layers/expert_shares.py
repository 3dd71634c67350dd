"""The experts of all layers where replicas compute some of them for each other, without any barrier.

A pass sends the rows of its tokens to the owners of their experts, and computes its own meanwhile. It adds a token's
pairs in ascending order of expert, as kernels in one process: the bits are the same. All replicas map the same file of
packed weights, so each can compute any expert. It computes others only if their replica does not answer.

Source: the asynchronous runtime of ExpertFlow (3.2, 3.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.kernels.cpu.expert_slots import SlotExperts, add_pairs
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.models.layers.expert_weights import Destination, ExpertWeights
from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.parallel.remote.compute_lock import ComputeLock
from moeflow.parallel.remote.expert_peers import Peer
from moeflow.parallel.remote.expert_work import Selection, max_rows
from moeflow.parallel.remote.work_client import PendingWork, scatter


@dataclass(slots=True)
class ShareStats:
    """What a replica's passes needed of others; the numbers only grow."""

    num_rows_sent: int = 0
    num_pairs_taken_over: int = 0  # computed here, because who should have done it was not there


class ExpertShares:
    """Which replica computes which experts, and this one's part of them: the `ExpertOwner` of its service."""

    def __init__(self, placement: ExpertPlacement, replica: int) -> None:
        """Take a placement with one home for each expert."""
        self.placement, self.replica = placement, replica
        self.num_layers, self.num_experts = len(placement.homes), len(placement.homes[0])
        self.hidden = 0  # once a layer has been added
        self.peers: Sequence[Peer] = ()  # once the model is loaded
        self.stats = ShareStats()
        self.baton = ComputeLock()  # of micro-batches that are in flight at once
        self._layers: list[PeerExperts] = []

    def add_layer(self, experts: PackedExperts) -> PeerExperts:
        """Return the next layer's experts; all can be read."""
        self.hidden = experts.hidden
        layer = PeerExperts(experts, len(self._layers), self)
        self._layers.append(layer)
        return layer

    @property
    def has_peers(self) -> bool:
        """Whether any other replica is there."""
        return any(peer.is_connected for peer in self.peers)

    @contextmanager
    def held(self, layer: int) -> Iterator[tuple[PackedExperts, Mapping[int, int]]]:
        """See `ExpertOwner`: nothing ever moves."""
        experts = self._layers[layer]
        yield experts.all, experts.own_slots


class PeerExperts(ExpertWeights):
    """One layer's experts."""

    def __init__(self, experts: PackedExperts, layer: int, shares: ExpertShares) -> None:
        """`layer` counts those with experts."""
        self.all = experts
        self._layer, self._shares = layer, shares
        homes = torch.tensor([ranks[0] for ranks in shares.placement.homes[layer]])
        self._is_of = [homes == replica for replica in range(shares.placement.num_ranks)]  # [E] bool each
        self.own_slots = _slots(self._is_of[shares.replica])

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `ExpertWeights`. Blocks until other replicas have answered or are given up; the compute lock is released
        meanwhile.
        """
        if not self._shares.has_peers:
            self._count_taken_over(topk_ids, ~self._is_of[self._shares.replica])
            return self.all.compute(hidden, topk_ids, topk_weights, residual)
        num_tokens, top_k = topk_ids.shape
        pairs = torch.empty(num_tokens * top_k, hidden.shape[1])
        step = max_rows(hidden.shape[1], top_k)
        for start in range(0, num_tokens, step):
            rows = slice(start, min(start + step, num_tokens))
            part = _TokenShare(
                hidden[rows], topk_ids[rows], topk_weights[rows], pairs[rows.start * top_k : rows.stop * top_k]
            )
            self._fill(part)
        return add_pairs(pairs, topk_ids, residual)

    def parts(self) -> Sequence[tuple[Destination, ...] | None]:
        """Return the parts of all experts: their memory is a file's."""
        return self.all.parts()

    def _fill(self, part: _TokenShare) -> None:
        """Compute the pairs of some tokens, here and elsewhere at once."""
        left = self._is_of[self._shares.replica].clone()
        sent: list[tuple[Peer, Tensor, PendingWork]] = []
        for peer in self._shares.peers:
            selection = Selection.of(part.topk_ids, part.topk_weights, self._is_of[peer.replica])
            if not len(selection.rows):
                continue
            pending = peer.submit(selection.work(self._layer, part.hidden))
            if pending is None:
                self._count_taken_over(part.topk_ids, self._is_of[peer.replica])
                left |= self._is_of[peer.replica]
            else:
                self._shares.stats.num_rows_sent += len(selection.rows)
                sent.append((peer, selection.pairs, pending))
        self._compute_here(part, left)
        lost = self._collect(sent, part)
        self._count_taken_over(part.topk_ids, lost)
        self._compute_here(part, lost)

    def _collect(self, sent: Sequence[tuple[Peer, Tensor, PendingWork]], part: _TokenShare) -> Tensor:
        """Take the results of others as they come; return the experts that none came of, [E] bool."""
        lost = torch.zeros_like(self._is_of[0])
        for peer, positions, pending in sent:
            with nullcontext() if pending.is_done else self._shares.baton.waiting():
                result = peer.result(pending)
            if result is None:
                lost |= self._is_of[peer.replica]
            else:
                scatter(part.pairs, result, positions)
        return lost

    def _compute_here(self, part: _TokenShare, is_wanted: Tensor) -> None:
        """Compute the pairs of some experts, [E] bool."""
        is_here = is_wanted[part.topk_ids]
        if is_here.any():
            ids = part.topk_ids.masked_fill(~is_here, self.all.num_experts)
            # One more than there are: what a pair asks for that is computed elsewhere.
            here = SlotExperts(self.all, self.all.num_experts + 1, _slots(is_wanted), self.all.biases)
            here.pairs(part.hidden, ids, part.topk_weights, part.pairs)

    def _count_taken_over(self, topk_ids: Tensor, of_others: Tensor) -> None:
        self._shares.stats.num_pairs_taken_over += int(of_others[topk_ids].sum())


@dataclass(frozen=True, slots=True)
class _TokenShare:
    """Some tokens of a pass, and where the results of their pairs go."""

    hidden: Tensor  # [T, H]
    topk_ids: Tensor  # [T, K]
    topk_weights: Tensor  # [T, K]
    pairs: Tensor  # [T * K, H]


def _slots(is_wanted: Tensor) -> dict[int, int]:
    """Return where experts lie in memory that holds all of them in order."""
    return {expert: expert for expert in is_wanted.nonzero().view(-1).tolist()}
