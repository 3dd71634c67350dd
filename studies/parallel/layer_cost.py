"""The price of one MoE layer for each rank, by the layout of its experts on the ranks.

Tokens are spread evenly over the ranks, and each rank routes its own. The source of counts is either known choices
(`ParallelLayer`) or the chances of routers (`layout_estimate.py`). Below, B are tokens, P ranks, E experts, K experts
per token, H the hidden size, and b bytes per value. Layouts:

- replicated: every rank has all experts; nothing is sent.
- expert: every rank has whole experts. A token goes once to each rank with some of its experts. A row comes back for
  each of these experts, so that the sum has a fixed order. A rank sends B/P (r + k) H b bytes, for r remote ranks and
  k experts there on average.
- expert-by-load: the same, with experts placed by their past tokens, and one more slot per rank for replicas.
- capacity, as DeepSpeed's: each rank sends every expert C = f K B / (P E) rows, padding included. Tokens beyond that
  are dropped (study of sliced experts, equation 6.1). One-hot products are left out.
- capacity-dropless: the same, where C is the largest number of tokens that an expert gets from a rank.
- sliced: every rank has a slice of every expert (algorithm 1 of that study). Ranks gather all tokens and choices, run
  all slices on all tokens, and reduce-scatter: 2 (P-1)/P B H b bytes per rank. A token travels once, whatever K is.
- layouts of other packages: as expert, with their placement.

Experts run one after the other, each by the roofline at its number of rows; large calls add activations. Messages go
at the link's rate for their size. Between devices both directions are concurrent; a rank of a host copies the rows
that it sends and receives. Reordered and joined rows pass through the rank's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moeflow.core.hardware import DEVICE, RAM, Link, LinkRate, Machine, MemoryLevel
from moeflow.core.parallel_config import SLICED
from moeflow.parallel.placement.layouts import CAPACITY, CAPACITY_DROPLESS, REPLICATED, place_experts
from moeflow.parallel.placement.placement import ExpertIds, ExpertPlacement, Loads, ServingTable
from moeflow.planner.costs.expected_experts import MEASURED_ROWS, activations_s
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.roofline import launch_seconds, work_seconds

CHOICE_BYTES: Final = 8  # of an expert's number and its weight
COPY_PASSES: Final = 2  # through memory of a byte that is copied: read, written

PerRank: TypeAlias = NDArray[Any]  # of numbers: [P], or [1] for the slowest rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRates:
    """Measured costs of a rank of a host beyond products. By default only bytes count."""

    choose_token_s: float = 0.0  # of softmax and the choice of experts: for each token,
    choose_logit_s: float = 0.0  # and for each of a token's experts to choose from
    copy_bytes_per_s: float | None = None  # of reordered rows, read and written; None: as memory is read
    exchange_s: float = 0.0  # of a collective, however little it moves
    exchange_bytes_per_s: float | None = None  # copied by a collective; None: as memory is read
    measured_rows: int = MEASURED_ROWS  # of a call, up to which kernels' efficiencies include all costs


class Experts(NamedTuple):
    """The work of experts."""

    num_pairs: PerRank  # of a token and an expert
    seconds: PerRank


class Moved(NamedTuple):
    """Items that go from their tokens' ranks to those of the experts."""

    chosen: PerRank  # of a rank's tokens
    arrived: PerRank  # at a rank's experts
    sent: PerRank  # of `chosen`, to other ranks
    received: PerRank  # of `arrived`, from other ranks
    passing: PerRank  # the larger of sent and received; through a host's memory, their sum


@dataclass(frozen=True, kw_only=True)
class RankedLayer:
    """One MoE layer on ranks that are alike, and the seconds of their operations."""

    level: MemoryLevel  # where a rank computes
    link: Link | None  # from a rank to all others, in each direction; None: ranks of a host, through its memory
    costs: ModelCosts
    num_ranks: int
    rates: RankRates = RankRates()

    @property
    def row_bytes(self) -> int:
        """A token's hidden state."""
        return self.costs.shape.hidden_size * self.costs.formats.activation_bytes

    @property
    def choice_bytes(self) -> int:
        """Experts of a token and their weights."""
        return self.costs.shape.routing.top_k * CHOICE_BYTES

    def route_s(self, num_tokens: PerRank) -> PerRank:
        """Return the seconds of each rank's router and shared expert."""
        choose_s = self.rates.choose_token_s + self.rates.choose_logit_s * self.costs.shape.routing.num_experts

        def seconds(tokens: float) -> float:
            works = self.costs.until_experts(tokens)[1:]
            return sum(work_seconds(self.level, work) for work in works) + tokens * choose_s

        return _each(num_tokens, seconds)

    def exchange_s(self, num_items: PerRank, item_bytes: int | None = None) -> PerRank:
        """Return the seconds of so many items that pass each rank, spread evenly over the other ranks.

        Items are rows, if they have no other size.
        """
        size = item_bytes or self.row_bytes
        if self.link is None:
            return self._memory_s(num_items, size)
        return _each(num_items, lambda items: self._messages_s(items, size))

    def gather_all_s(self, num_items: int, item_bytes: int) -> float:
        """Return the seconds of an all-gather, or reduce-scatter, of so many items, in P-1 steps between devices."""
        if self.link is None:
            return float(self._memory_s(num_items, item_bytes))  # its own for all, others' once
        chunk_bytes = ceil(num_items / self.num_ranks) * item_bytes
        return self.link.seconds(chunk_bytes * (self.num_ranks - 1), chunk_bytes)

    def copy_s(self, num_rows: PerRank) -> PerRank:
        """Return each rank's seconds to copy so many rows in its own memory."""
        rate = self.rates.copy_bytes_per_s or self.level.read_bytes_per_s
        return num_rows * (COPY_PASSES * float(self.row_bytes)) / rate

    def _memory_s(self, num_items: PerRank | float, item_bytes: int) -> PerRank:
        """Return the seconds of a collective through a host's memory."""
        rate = self.rates.exchange_bytes_per_s or self.level.read_bytes_per_s
        return self.rates.exchange_s + np.asarray(num_items, float) * (COPY_PASSES * float(item_bytes)) / rate

    def _messages_s(self, num_items: float, item_bytes: int) -> float:
        assert self.link is not None, "a host's ranks copy"
        num_messages = min(self.num_ranks - 1, num_items)
        num_bytes = num_items * item_bytes
        return self.link.seconds(num_bytes, num_bytes / num_messages) if num_messages else 0.0


@dataclass(frozen=True, kw_only=True)
class ParallelLayer(RankedLayer):
    """A layer and its router's choices."""

    topk_ids: ExpertIds  # [T, K] of all ranks' tokens; rank 0 has the first
    loads: Loads  # [E] tokens that experts have had before
    capacity_factor: float  # f

    @cached_property
    def own_tokens(self) -> PerRank:
        """Tokens of each rank, [P]: as many as the others', or one more."""
        return _even_parts(len(self.topk_ids), self.num_ranks)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """The rank of each token, [T]."""
        return np.repeat(np.arange(self.num_ranks), self.own_tokens)

    @property
    def own_pairs(self) -> NDArray[np.int64]:
        """How many of a rank's tokens each expert has, [P, E]."""
        return self.pairs_at(self.owners[:, None])

    def pairs_at(self, ranks: ExpertIds) -> NDArray[np.int64]:
        """Return how many tokens of each expert are at each rank, [P, E], if they are at `ranks`, [T, K]."""
        num_experts = self.costs.shape.routing.num_experts
        cells = ranks * num_experts + self.topk_ids
        return np.bincount(cells.ravel(), minlength=self.num_ranks * num_experts).reshape(self.num_ranks, num_experts)

    def experts_of(self, pairs: NDArray[np.int64], num_calls: PerRank | int = 1) -> Experts:
        """Return experts that have so many rows each, [P, E], in one call or more."""
        calls = np.maximum(np.broadcast_to(num_calls, self.num_ranks), 1)
        of_ranks = zip(pairs, pairs.sum(axis=1) // calls, calls, strict=True)
        seconds = [self.call_s(self.costs, counts, rows, number) for counts, rows, number in of_ranks]
        return Experts(pairs.sum(axis=1), np.array(seconds))

    def passing(self, sent: PerRank, received: PerRank) -> PerRank:
        """Return the items that pass each rank: a link has both directions at once, memory has not."""
        return sent + received if self.link is None else np.maximum(sent, received)

    def call_s(self, costs: ModelCosts, counts: NDArray[np.int64], num_pairs: float, num_calls: int = 1) -> float:
        """Return the seconds of experts with so many rows each, [E], and of the activations of each call."""
        different, numbers = np.unique(counts[counts > 0], return_counts=True)
        cases = zip(different.tolist(), numbers.tolist(), strict=True)
        works = [(num, costs.experts(rows / costs.shape.routing.top_k, 1)) for rows, num in cases]
        more_s = num_calls * activations_s(self.level, costs, num_pairs, self.rates.measured_rows)
        return launch_seconds(self.level, works) + more_s

    def moved(self, ranks: ExpertIds, *, is_once: bool = False) -> Moved:
        """Count the choices that go to `ranks`, [T, K]; `is_once`: those of a token for the same rank as one."""
        ordered = np.sort(ranks, axis=1)
        counts = np.ones(ordered.shape, bool)
        if is_once:
            counts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        is_remote = counts & (ordered != self.owners[:, None])

        def of_owners(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
            return np.bincount(self.owners, weights=chosen.sum(axis=1), minlength=self.num_ranks).astype(np.int64)

        def at_ranks(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
            return np.bincount(ordered[chosen], minlength=self.num_ranks)

        sent, received = of_owners(is_remote), at_ranks(is_remote)
        return Moved(of_owners(counts), at_ranks(counts), sent, received, self.passing(sent, received))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The price of a layout."""

    sections: Mapping[str, PerRank]  # seconds of each rank, in order; all ranks begin each at the same time
    num_flops: PerRank  # of experts, padding included
    sent_bytes: PerRank
    weight_bytes: PerRank  # of one layer's experts
    num_dropped: int = 0  # of the T * K choices


def rank_link(machine: Machine, bytes_per_s: float | None) -> Link | None:
    """Return the link between ranks: of a given rate, or through the host's memory where none is given.

    Devices then write to it and read from it at once, at the slower rate; of ranks of a host there is no link.
    """
    if bytes_per_s is not None:
        return Link(source="rank", target="rank", rates=(LinkRate(transfer_bytes=1, bytes_per_s=bytes_per_s),))
    if not machine.num_devices:
        return None
    both = machine.link(DEVICE, RAM), machine.link(RAM, DEVICE)
    return min(both, key=lambda link: link.peak_bytes_per_s)


def padded_rows(capacity_factor: float, top_k: int, num_tokens: int, num_experts: int) -> int:
    """Return C, the rows that a rank of so many tokens sends each expert: at most its tokens, then none is dropped."""
    return min(ceil(capacity_factor * top_k * num_tokens / num_experts), num_tokens)


def layer_cost(layout: str, at: ParallelLayer) -> LayerCost:
    """Return the cost of one of `LAYOUTS`. Raises: ConfigError if it is another package's and cannot be used."""
    if layout in _PADDED:
        return _PADDED[layout](at)
    if layout == REPLICATED:
        return replicated_cost(at, at.own_tokens, at.experts_of(at.own_pairs))
    if layout == SLICED:
        counts, num_pairs = np.bincount(at.topk_ids.ravel()), at.topk_ids.size
        return sliced_cost(at, at.own_tokens, len(at.topk_ids), lambda costs: at.call_s(costs, counts, num_pairs))
    placement = place_experts(layout, at.loads[None], at.num_ranks)
    ranks = ServingTable(placement.homes[0]).ranks(at.topk_ids)
    rows, results = at.moved(ranks, is_once=True), at.moved(ranks)
    return placed_cost(at, at.own_tokens, placement, at.experts_of(at.pairs_at(ranks)), rows, results)


def replicated_cost(at: RankedLayer, own_tokens: PerRank, experts: Experts) -> LayerCost:
    """Return the cost without any exchange, hence in one section."""
    return LayerCost(
        sections={"experts": at.route_s(own_tokens) + experts.seconds},
        num_flops=experts.num_pairs * _pair_flops(at.costs),
        sent_bytes=np.zeros(at.num_ranks),
        weight_bytes=np.full(at.num_ranks, at.costs.shape.routing.num_experts * at.costs.expert_bytes),
    )


def placed_cost(
    at: RankedLayer, own_tokens: PerRank, placement: ExpertPlacement, experts: Experts, rows: Moved, results: Moved
) -> LayerCost:
    """Return the cost of whole experts on their ranks; a rank's own rows and pairs are copied like the others'."""
    own_pairs = own_tokens * at.costs.shape.routing.top_k
    return LayerCost(
        sections={
            "route": at.route_s(own_tokens),
            "dispatch": at.exchange_s(rows.passing)
            + at.exchange_s(rows.passing, at.choice_bytes)
            + at.copy_s(rows.chosen + rows.arrived),  # picked by destination; joined
            "experts": experts.seconds,
            "combine": at.exchange_s(results.passing)
            + at.copy_s(results.arrived + 2 * own_pairs),  # picked by source; reordered; added up
        },
        num_flops=experts.num_pairs * _pair_flops(at.costs),
        sent_bytes=rows.sent * float(at.row_bytes + at.choice_bytes) + results.received * float(at.row_bytes),
        weight_bytes=_num_held(placement) * float(at.costs.expert_bytes),
    )


def sliced_cost(
    at: RankedLayer, own_tokens: PerRank, num_tokens: int, experts_s: Callable[[ModelCosts], float]
) -> LayerCost:
    """Return the cost of slices, whose widths differ by one at most; `experts_s` are those of all tokens."""
    shape = at.costs.shape
    widths = _even_parts(shape.feed_forward.intermediate_size, at.num_ranks)

    def each_rank(function: Callable[[ModelCosts], float]) -> PerRank:
        return _each(
            widths, lambda width: function(replace(at.costs, shape=shape.with_fields(intermediate_size=int(width))))
        )

    tokens_s = at.gather_all_s(num_tokens, at.row_bytes)
    gathered_s = at.gather_all_s(num_tokens, at.choice_bytes) + tokens_s
    sent_bytes = (at.num_ranks - 1.0) * own_tokens * (at.row_bytes + at.choice_bytes)
    return LayerCost(
        sections={
            "route": at.route_s(own_tokens),
            "dispatch": gathered_s + at.copy_s(np.full_like(own_tokens, num_tokens)),  # joined
            "experts": each_rank(experts_s),
            "combine": tokens_s + at.copy_s(at.num_ranks * own_tokens),  # added up
        },
        num_flops=num_tokens * shape.routing.top_k * each_rank(_pair_flops),
        sent_bytes=sent_bytes + (num_tokens - own_tokens) * at.row_bytes,
        weight_bytes=shape.routing.num_experts * each_rank(lambda costs: costs.expert_bytes),
    )


def _capacity(at: ParallelLayer) -> LayerCost:
    """Return the cost of the padded baseline."""
    shape = at.costs.shape
    return _padded(
        at, padded_rows(at.capacity_factor, shape.routing.top_k, int(at.own_tokens.max()), shape.routing.num_experts)
    )


def _capacity_dropless(at: ParallelLayer) -> LayerCost:
    """Return the cost of the padded baseline that pads to the most tokens of an expert from a rank."""
    return _padded(at, int(at.own_pairs.max()))


def _padded(at: ParallelLayer, capacity: int) -> LayerCost:
    shape = at.costs.shape
    num_held = _num_held(ExpertPlacement.by_index(1, shape.routing.num_experts, at.num_ranks))
    is_held = np.arange(shape.routing.num_experts) < num_held[:, None]  # any of them: all have as many rows
    experts = at.experts_of(is_held * at.num_ranks * capacity, num_calls=num_held)
    sent, received = (shape.routing.num_experts - num_held) * capacity, num_held * (at.num_ranks - 1) * capacity
    held, own = num_held * at.num_ranks * capacity, np.full(at.num_ranks, shape.routing.num_experts * capacity)
    exchange_s, own_pairs = at.exchange_s(at.passing(sent, received)), at.own_tokens * shape.routing.top_k
    return LayerCost(
        sections={
            "route": at.route_s(at.own_tokens),
            "dispatch": exchange_s + at.copy_s(own + own_pairs + held),  # zeros; tokens among them; by expert
            "experts": experts.seconds,
            "combine": exchange_s + at.copy_s(held + own + 3 * own_pairs),  # by rank; joined; weighted and added up
        },
        num_flops=experts.num_pairs * _pair_flops(at.costs),
        sent_bytes=(sent + received) * float(at.row_bytes),  # each token that arrives goes back as a result
        weight_bytes=num_held * float(at.costs.expert_bytes),
        num_dropped=int(np.maximum(at.own_pairs - capacity, 0).sum()),
    )


_PADDED: Final[Mapping[str, Callable[[ParallelLayer], LayerCost]]] = {
    CAPACITY: _capacity,
    CAPACITY_DROPLESS: _capacity_dropless,
}


def _num_held(placement: ExpertPlacement) -> NDArray[np.int64]:
    """Return how many experts each rank has, [P]."""
    ranks = [rank for homes in placement.homes[0] for rank in homes]
    return np.bincount(ranks, minlength=placement.num_ranks)


def _pair_flops(costs: ModelCosts) -> float:
    """Return the operations of a token and an expert."""
    return 2.0 * costs.expert_values


def _even_parts(total: int, number: int) -> NDArray[np.int64]:
    """Return a total in parts that differ by one at most, the larger first."""
    share, rest = divmod(total, number)
    return share + (np.arange(number) < rest)


def _each(values: PerRank, function: Callable[[float], float]) -> PerRank:
    """Return a function of each value, computed once for equal values."""
    different, where = np.unique(values, return_inverse=True)
    return np.array([function(value) for value in different.tolist()], float)[where]
