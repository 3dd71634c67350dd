"""What one MoE layer costs each rank, by how its experts lie on the ranks, for tokens whose experts are known.

Tokens are spread evenly over the ranks, and each rank routes its own. Layouts:

- replicated: every rank has all experts; nothing is sent.
- expert: every rank has whole experts. A token goes once to each rank that has some of its experts, and one row, their
  sum, comes back: 2 B/P r H b bytes a rank for r remote ranks on average (B tokens, P ranks, H hidden, b bytes).
- expert-by-load: the same, experts placed by how many tokens they have had, with a slot more a rank for replicas.
- capacity: as DeepSpeed's: each rank sends every expert C = f K B / (P E) rows, padding included, whatever the router
  chose; tokens beyond that are dropped (study of sliced experts, equation 6.1). One-hot products are left out.
- sliced: every rank has a slice of every expert (algorithm 1 of that study): all-gather of counts and of tokens, all
  slices on all tokens, reduce-scatter: 2 (P-1)/P B H b bytes a rank. A token travels once, whatever K is.

Compute is by the roofline, permuting rows left out; messages go at the link's rate for their size, both ways at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moeflow.core.hardware import DEVICE, RAM, Link, LinkRate, Machine, MemoryLevel
from moeflow.parallel.placement import ExpertIds, ExpertPlacement, Loads
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.roofline import work_seconds

CAPACITY: Final = "capacity"
CAPACITY_DROPLESS: Final = "capacity-dropless"
CHOICE_BYTES: Final = 8  # of an expert's number and its weight

PerRank: TypeAlias = NDArray[np.floating]  # [P]


@dataclass(frozen=True, kw_only=True)
class ParallelLayer:
    """One MoE layer on ranks that are alike, and what its router chose."""

    level: MemoryLevel  # where a rank computes
    link: Link  # from a rank to all others, in each direction
    costs: ModelCosts
    num_ranks: int
    topk_ids: ExpertIds  # [T, K] of all ranks' tokens; rank 0 has the first
    loads: Loads  # [E] tokens that experts have had before
    capacity_factor: float  # f

    @cached_property
    def num_tokens(self) -> NDArray[np.int64]:
        """Tokens of each rank, [P]: as many as the others', or one more."""
        share, rest = divmod(len(self.topk_ids), self.num_ranks)
        return share + (np.arange(self.num_ranks) < rest)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """The rank of each token, [T]."""
        return np.repeat(np.arange(self.num_ranks), self.num_tokens)

    @property
    def row_bytes(self) -> int:
        """A token's hidden state."""
        return self.costs.shape.hidden_size * self.costs.formats.activation_bytes

    @property
    def route_s(self) -> PerRank:
        """Seconds of each rank's router."""
        return _each(self.num_tokens, lambda tokens: work_seconds(self.level, self.costs.router(tokens)))

    def pairs_at(self, ranks: ExpertIds) -> NDArray[np.int64]:
        """Return how many tokens of each expert are at each rank, [P, E], if they are at `ranks`, [T, K]."""
        num_experts = self.costs.shape.num_experts
        cells = ranks * num_experts + self.topk_ids
        return np.bincount(cells.ravel(), minlength=self.num_ranks * num_experts).reshape(self.num_ranks, num_experts)

    def exchange_s(self, num_rows: NDArray[np.int64]) -> PerRank:
        """Return the seconds in which each rank sends or receives so many rows, about as many to or from each other."""
        return _each(num_rows, self._exchange_s)

    def ring_s(self, chunk_bytes: float) -> float:
        """Return the seconds of an all-gather, or reduce-scatter, in P-1 steps of a chunk each."""
        return self.link.seconds(chunk_bytes * (self.num_ranks - 1), chunk_bytes)

    def _exchange_s(self, rows: float) -> float:
        num_messages = min(self.num_ranks - 1, rows)
        return self.link.seconds(rows * self.row_bytes, rows * self.row_bytes / num_messages) if num_messages else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What a layout brings."""

    sections: Mapping[str, PerRank]  # seconds of each rank, in order; all ranks begin each together
    num_flops: PerRank  # of experts, padding included
    sent_bytes: PerRank
    weight_bytes: PerRank  # of one layer's experts
    num_dropped: int = 0  # of the T * K choices


def rank_link(machine: Machine, bytes_per_s: float | None) -> Link:
    """Return the way between ranks: of a given rate, or through the host's memory where none is given.

    Devices then write to it and read from it at once, at the slower rate; ranks of a host copy: they read and write.
    """
    if bytes_per_s is None and machine.num_devices:
        both = machine.link(DEVICE, RAM), machine.link(RAM, DEVICE)
        return min(both, key=lambda link: link.peak_bytes_per_s)
    rate = bytes_per_s or machine.level(RAM).read_bytes_per_s / 2
    return Link(source="rank", target="rank", rates=(LinkRate(transfer_bytes=1, bytes_per_s=rate),))


def _replicated(at: ParallelLayer) -> LayerCost:
    """Return the cost without any exchange, hence in one section."""
    pairs = at.pairs_at(at.owners[:, None])
    flops, experts_s = _expert_work(at, pairs.sum(axis=1), (pairs > 0).sum(axis=1))
    return LayerCost(
        sections={"experts": at.route_s + experts_s},
        num_flops=flops,
        sent_bytes=np.zeros(at.num_ranks),
        weight_bytes=_weights(at, np.full(at.num_ranks, at.costs.shape.num_experts)),
    )


def _expert(at: ParallelLayer) -> LayerCost:
    return _placed(at, _by_index(at))


def _expert_by_load(at: ParallelLayer) -> LayerCost:
    slots = ceil(at.costs.shape.num_experts / at.num_ranks) + 1
    return _placed(at, ExpertPlacement.by_load(at.loads[None], at.num_ranks, slots))


def _placed(at: ParallelLayer, placement: ExpertPlacement) -> LayerCost:
    """Return the cost of whole experts on their ranks."""
    ranks = placement.serving_ranks(0, at.topk_ids)
    pairs = at.pairs_at(ranks)
    flops, experts_s = _expert_work(at, pairs.sum(axis=1), (pairs > 0).sum(axis=1))
    sent, received = _remote_rows(at, ranks)
    exchange_s = at.exchange_s(np.maximum(sent, received))
    return LayerCost(
        sections={"route": at.route_s, "dispatch": exchange_s, "experts": experts_s, "combine": exchange_s},
        num_flops=flops,
        sent_bytes=(sent + received) * float(at.row_bytes),  # what comes as a token goes back as a result
        weight_bytes=_weights(at, _num_held(placement)),
    )


def padded_rows(capacity_factor: float, top_k: int, num_tokens: int, num_experts: int) -> int:
    """Return C, the rows that a rank of so many tokens sends each expert; with as many as tokens, none is dropped."""
    return min(ceil(capacity_factor * top_k * num_tokens / num_experts), num_tokens)


def _capacity(at: ParallelLayer) -> LayerCost:
    """Return the cost of the padded baseline."""
    shape = at.costs.shape
    return _padded(at, padded_rows(at.capacity_factor, shape.top_k, int(at.num_tokens.max()), shape.num_experts))


def _capacity_dropless(at: ParallelLayer) -> LayerCost:
    """Return the cost of the padded baseline with room for the most tokens that an expert gets from a rank."""
    return _padded(at, int(at.pairs_at(at.owners[:, None]).max()))


def _padded(at: ParallelLayer, capacity: int) -> LayerCost:
    shape = at.costs.shape
    num_held = _num_held(_by_index(at))
    flops, experts_s = _expert_work(at, num_held * at.num_ranks * capacity, num_held)
    sent, received = (shape.num_experts - num_held) * capacity, num_held * (at.num_ranks - 1) * capacity
    exchange_s = at.exchange_s(np.maximum(sent, received))
    return LayerCost(
        sections={"route": at.route_s, "dispatch": exchange_s, "experts": experts_s, "combine": exchange_s},
        num_flops=flops,
        sent_bytes=(sent + received) * float(at.row_bytes),
        weight_bytes=_weights(at, num_held),
        num_dropped=int(np.maximum(at.pairs_at(at.owners[:, None]) - capacity, 0).sum()),
    )


def _sliced(at: ParallelLayer) -> LayerCost:
    """Return the cost of slices; widths differ by one at most."""
    shape, ranks = at.costs.shape, np.arange(at.num_ranks)
    widths = shape.intermediate_size // at.num_ranks + (ranks < shape.intermediate_size % at.num_ranks)
    num_tokens, distinct = len(at.topk_ids), len(np.unique(at.topk_ids))
    slices = {int(width): replace(at.costs, shape=replace(shape, intermediate_size=int(width))) for width in widths}
    works = {width: costs.experts(num_tokens, distinct) for width, costs in slices.items()}
    tokens_s = np.full(at.num_ranks, at.ring_s(int(at.num_tokens.max()) * at.row_bytes))
    counts_bytes = shape.num_experts * COUNT_BYTES
    return LayerCost(
        sections={
            "route": at.route_s,
            "gather counts": np.full(at.num_ranks, at.ring_s(counts_bytes)),
            "gather tokens": tokens_s,
            "experts": _each(widths, lambda width: work_seconds(at.level, works[int(width)])),
            "reduce-scatter": tokens_s,
        },
        num_flops=_each(widths, lambda width: works[int(width)].num_flops),
        sent_bytes=(at.num_ranks - 1) * counts_bytes + 2.0 * (num_tokens - at.num_tokens) * at.row_bytes,
        weight_bytes=_each(widths, lambda width: shape.num_experts * slices[int(width)].expert_bytes),
    )


LAYOUTS: Final[Mapping[str, Callable[[ParallelLayer], LayerCost]]] = {
    "replicated": _replicated,
    "expert": _expert,
    "expert-by-load": _expert_by_load,
    CAPACITY: _capacity,
    CAPACITY_DROPLESS: _capacity_dropless,
    "sliced": _sliced,
}


def _by_index(at: ParallelLayer) -> ExpertPlacement:
    return ExpertPlacement.by_index(1, at.costs.shape.num_experts, at.num_ranks)


def _num_held(placement: ExpertPlacement) -> NDArray[np.int64]:
    """Return how many experts each rank has, [P]."""
    ranks = [rank for homes in placement.homes[0] for rank in homes]
    return np.bincount(ranks, minlength=placement.num_ranks)


def _weights(at: ParallelLayer, num_held: NDArray[np.int64]) -> PerRank:
    return num_held * float(at.costs.expert_bytes)


def _expert_work(
    at: ParallelLayer, num_pairs: NDArray[np.int64], distinct: NDArray[np.int64]
) -> tuple[PerRank, PerRank]:
    """Return operations and seconds of each rank for so many pairs of a token and one of `distinct` experts."""
    top_k = at.costs.shape.top_k
    works = [
        at.costs.experts(pairs / top_k, used) for pairs, used in zip(num_pairs.tolist(), distinct.tolist(), strict=True)
    ]
    seconds = [work_seconds(at.level, work) for work in works]
    return np.array([work.num_flops for work in works]), np.array(seconds)


def _remote_rows(at: ParallelLayer, ranks: ExpertIds) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many rows each rank sends and receives, [P] each, if tokens go to `ranks`, [T, K], once to each."""
    ordered = np.sort(ranks, axis=1)
    is_first = np.ones(ordered.shape, bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    rows, columns = np.nonzero(is_first & (ordered != at.owners[:, None]))
    sent = np.bincount(at.owners[rows], minlength=at.num_ranks)
    return sent, np.bincount(ordered[rows, columns], minlength=at.num_ranks)


def _each(values: NDArray[np.int64], function: Callable[[float], float]) -> PerRank:
    """Return a function of each value, computed once for those that are equal."""
    different, where = np.unique(values, return_inverse=True)
    return np.array([function(value) for value in different.tolist()], float)[where]
