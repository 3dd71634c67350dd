"""What one MoE layer costs each rank, by how its experts lie on the ranks, for tokens whose experts are known.

Tokens are spread evenly over the ranks, and each rank routes its own. Layouts:

- replicated: every rank has all experts; nothing is sent.
- expert: every rank has whole experts. A token goes once to each rank that has some of its experts, and a row for each
  of these comes back, so that sums can be added up in order: B/P (r + k) H b bytes a rank for r remote ranks and k
  experts there on average (B tokens, P ranks, H hidden, b bytes).
- expert-by-load: the same, experts placed by how many tokens they have had, with a slot more a rank for replicas.
- capacity: as DeepSpeed's: each rank sends every expert C = f K B / (P E) rows, padding included, whatever the router
  chose; tokens beyond that are dropped (study of sliced experts, equation 6.1). One-hot products are left out.
- capacity-dropless: the same, C being the most tokens that an expert gets from a rank.
- sliced: every rank has a slice of every expert (algorithm 1 of that study): all-gather of tokens and their choices,
  all slices on all tokens, reduce-scatter: 2 (P-1)/P B H b bytes a rank. A token travels once, whatever K is.
- what other packages add: as expert, with experts placed as they say.

Experts run one after the other, each by the roofline at the rows it has; in large calls activations come on top.
Messages go at the link's rate for their size: between devices both ways at once; a rank of a host copies what it sends
and what it gets itself. Rows that are put in order, or together, pass through the rank's own memory.
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
from moeflow.core.parallel_config import SLICED
from moeflow.parallel.placement.layouts import CAPACITY, CAPACITY_DROPLESS, LAYOUTS, REPLICATED, place_experts
from moeflow.parallel.placement.placement import ExpertIds, ExpertPlacement, Loads, ServingTable
from moeflow.planner.costs.model_costs import ModelCosts, Work
from moeflow.planner.costs.roofline import launch_seconds, processor_of, work_seconds

CHOICE_BYTES: Final = 8  # of an expert's number and its weight
COPY_PASSES: Final = 2  # through memory of a byte that is copied: read, written
MEASURED_ROWS: Final = 512  # of a call: what activations cost up to there is part of a kernel's measured speed

PerRank: TypeAlias = NDArray[np.floating]  # [P]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRates:
    """What a rank of a host pays beside products, where it was measured; as it stands, only bytes count."""

    choose_token_s: float = 0.0  # of softmax and the choice of experts: for each token,
    choose_logit_s: float = 0.0  # and for each of a token's experts to choose from
    copy_bytes_per_s: float | None = None  # of rows that are put in order, read and written; None: as memory is read
    exchange_s: float = 0.0  # of a collective, however little it moves
    exchange_bytes_per_s: float | None = None  # of what it copies; None: as memory is read
    measured_rows: int = MEASURED_ROWS  # of a call, up to which kernels' efficiencies have all that it takes


@dataclass(frozen=True, kw_only=True)
class RankedLayer:
    """One MoE layer on ranks that are alike."""

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
        """What a token's experts and their weights take."""
        return self.costs.shape.top_k * CHOICE_BYTES

    def exchange_s(
        self,
        num_sent: PerRank | NDArray[np.int64],
        num_received: PerRank | NDArray[np.int64],
        item_bytes: int | None = None,
    ) -> PerRank:
        """Return the seconds in which each rank sends and receives so many items, about as many to or from each other.

        Items are rows, if they have no other size.
        """
        size = item_bytes or self.row_bytes
        if self.link is None:
            return self._memory_s(num_sent + num_received, size)
        return _each(np.maximum(num_sent, num_received), lambda items: self._messages_s(items, size))

    def gather_all_s(self, num_items: int, item_bytes: int) -> float:
        """Return the seconds of an all-gather, or reduce-scatter, of so many items, in P-1 steps between devices."""
        if self.link is None:
            return float(self._memory_s(num_items, item_bytes))  # its own for all, others' once
        chunk_bytes = ceil(num_items / self.num_ranks) * item_bytes
        return self.link.seconds(chunk_bytes * (self.num_ranks - 1), chunk_bytes)

    def copy_s(self, num_items: PerRank | NDArray[np.int64] | float, item_bytes: int | None = None) -> PerRank:
        """Return the seconds in which each rank copies so many items, or rows, in its own memory."""
        rate = self.rates.copy_bytes_per_s or self.level.read_bytes_per_s
        return np.asarray(num_items, float) * (COPY_PASSES * float(item_bytes or self.row_bytes)) / rate

    def choose_s(self, num_tokens: float) -> float:
        """Return the seconds of softmax and the choice of experts, where that was measured."""
        rates = self.rates
        return num_tokens * (rates.choose_token_s + rates.choose_logit_s * self.costs.shape.num_experts)

    def _memory_s(self, num_items: PerRank | NDArray[np.int64] | float, item_bytes: int) -> PerRank:
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
    """A layer and what its router chose."""

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
    def route_s(self) -> PerRank:
        """Seconds of each rank's router, and of a shared expert."""
        return _each(
            self.num_tokens,
            lambda tokens: (
                sum(work_seconds(self.level, work) for work in self.costs.until_experts(tokens)[1:])
                + self.choose_s(tokens)
            ),
        )

    def pairs_at(self, ranks: ExpertIds) -> NDArray[np.int64]:
        """Return how many tokens of each expert are at each rank, [P, E], if they are at `ranks`, [T, K]."""
        num_experts = self.costs.shape.num_experts
        cells = ranks * num_experts + self.topk_ids
        return np.bincount(cells.ravel(), minlength=self.num_ranks * num_experts).reshape(self.num_ranks, num_experts)

    def gather_s(self, item_bytes: int) -> PerRank:
        """Return each rank's seconds of an all-gather, or reduce-scatter, of an item a token."""
        return np.full(self.num_ranks, self.gather_all_s(len(self.topk_ids), item_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What a layout brings."""

    sections: Mapping[str, PerRank]  # seconds of each rank, in order; all ranks begin each together
    num_flops: PerRank  # of experts, padding included
    sent_bytes: PerRank
    weight_bytes: PerRank  # of one layer's experts
    num_dropped: int = 0  # of the T * K choices


def rank_link(machine: Machine, bytes_per_s: float | None) -> Link | None:
    """Return the way between ranks: of a given rate, or through the host's memory where none is given.

    Devices then write to it and read from it at once, at the slower rate; of ranks of a host there is no link.
    """
    if bytes_per_s is not None:
        return Link(source="rank", target="rank", rates=(LinkRate(transfer_bytes=1, bytes_per_s=bytes_per_s),))
    if not machine.num_devices:
        return None
    both = machine.link(DEVICE, RAM), machine.link(RAM, DEVICE)
    return min(both, key=lambda link: link.peak_bytes_per_s)


def padded_rows(capacity_factor: float, top_k: int, num_tokens: int, num_experts: int) -> int:
    """Return C, the rows that a rank of so many tokens sends each expert; with as many as tokens, none is dropped."""
    return min(ceil(capacity_factor * top_k * num_tokens / num_experts), num_tokens)


def _replicated(at: ParallelLayer) -> LayerCost:
    """Return the cost without any exchange, hence in one section."""
    flops, experts_s = _expert_work(at, at.pairs_at(at.owners[:, None]))
    return LayerCost(
        sections={"experts": at.route_s + experts_s},
        num_flops=flops,
        sent_bytes=np.zeros(at.num_ranks),
        weight_bytes=_weights(at, np.full(at.num_ranks, at.costs.shape.num_experts)),
    )


def _placed(layout: str, at: ParallelLayer) -> LayerCost:
    """Return the cost of whole experts on their ranks; a rank's own rows and pairs are copied like the others'."""
    placement = place_experts(layout, at.loads[None], at.num_ranks)
    ranks = ServingTable(placement.homes[0]).ranks(at.topk_ids)
    pairs = at.pairs_at(ranks)
    flops, experts_s = _expert_work(at, pairs)
    rows, results = _moved(at, ranks, is_once=True), _moved(at, ranks, is_once=False)
    own_pairs = at.num_tokens * at.costs.shape.top_k
    return LayerCost(
        sections={
            "route": at.route_s,
            "dispatch": at.exchange_s(rows.sent, rows.received)
            + at.exchange_s(rows.sent, rows.received, at.choice_bytes)
            + at.copy_s(rows.chosen + rows.arrived),  # picked by destination; put together
            "experts": experts_s,
            "combine": at.exchange_s(results.received, results.sent)
            + at.copy_s(results.arrived + 2 * own_pairs),  # picked by source; put in place; added up
        },
        num_flops=flops,
        sent_bytes=rows.sent * float(at.row_bytes + at.choice_bytes) + results.received * float(at.row_bytes),
        weight_bytes=_weights(at, _num_held(placement)),
    )


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
    is_held = np.arange(shape.num_experts) < num_held[:, None]  # which they are does not matter: all have as many rows
    flops, experts_s = _expert_work(at, is_held * at.num_ranks * capacity, num_calls=num_held)
    sent, received = (shape.num_experts - num_held) * capacity, num_held * (at.num_ranks - 1) * capacity
    held, own = num_held * at.num_ranks * capacity, np.full(at.num_ranks, shape.num_experts * capacity)
    exchange_s, own_pairs = at.exchange_s(sent, received), at.num_tokens * shape.top_k
    return LayerCost(
        sections={
            "route": at.route_s,
            "dispatch": exchange_s + at.copy_s(own + own_pairs + held),  # zeros; tokens among them; by expert
            "experts": experts_s,
            "combine": exchange_s + at.copy_s(held + own + 3 * own_pairs),  # by rank; together; weighted and added up
        },
        num_flops=flops,
        sent_bytes=(sent + received) * float(at.row_bytes),  # what comes as a token goes back as a result
        weight_bytes=_weights(at, num_held),
        num_dropped=int(np.maximum(at.pairs_at(at.owners[:, None]) - capacity, 0).sum()),
    )


def _sliced(at: ParallelLayer) -> LayerCost:
    """Return the cost of slices; widths differ by one at most."""
    shape, ranks = at.costs.shape, np.arange(at.num_ranks)
    widths = shape.intermediate_size // at.num_ranks + (ranks < shape.intermediate_size % at.num_ranks)
    counts = np.bincount(at.topk_ids.ravel(), minlength=shape.num_experts)
    slices = {int(width): replace(at.costs, shape=replace(shape, intermediate_size=int(width))) for width in widths}
    works = {width: _works(costs, counts) for width, costs in slices.items()}

    def experts_s(width: float) -> float:
        more_s = activations_s(at.level, slices[int(width)], at.topk_ids.size, at.rates.measured_rows)
        return launch_seconds(at.level, works[int(width)]) + more_s

    num_tokens = np.full(at.num_ranks, len(at.topk_ids))
    others = num_tokens - at.num_tokens
    tokens_s = at.gather_s(at.row_bytes)
    return LayerCost(
        sections={
            "route": at.route_s,
            "dispatch": at.gather_s(at.choice_bytes) + tokens_s + at.copy_s(num_tokens),  # put together
            "experts": _each(widths, experts_s),
            "combine": tokens_s + at.copy_s(at.num_ranks * at.num_tokens),  # added up
        },
        num_flops=_each(widths, lambda width: sum(count * work.num_flops for count, work in works[int(width)])),
        sent_bytes=(at.num_ranks - 1.0) * at.num_tokens * (at.row_bytes + at.choice_bytes) + others * at.row_bytes,
        weight_bytes=_each(widths, lambda width: shape.num_experts * slices[int(width)].expert_bytes),
    )


_UNPLACED: Final[Mapping[str, Callable[[ParallelLayer], LayerCost]]] = {
    REPLICATED: _replicated,
    CAPACITY: _capacity,
    CAPACITY_DROPLESS: _capacity_dropless,
    SLICED: _sliced,
}


def layer_cost(layout: str, at: ParallelLayer) -> LayerCost:
    """Return what one of `LAYOUTS` brings. Raises: ConfigError if it is another package's and cannot be used."""
    return _placed(layout, at) if LAYOUTS[layout] is not None else _UNPLACED[layout](at)


def _by_index(at: ParallelLayer) -> ExpertPlacement:
    return ExpertPlacement.by_index(1, at.costs.shape.num_experts, at.num_ranks)


def _num_held(placement: ExpertPlacement) -> NDArray[np.int64]:
    """Return how many experts each rank has, [P]."""
    ranks = [rank for homes in placement.homes[0] for rank in homes]
    return np.bincount(ranks, minlength=placement.num_ranks)


def _weights(at: ParallelLayer, num_held: NDArray[np.int64]) -> PerRank:
    return num_held * float(at.costs.expert_bytes)


def _expert_work(
    at: ParallelLayer, pairs: NDArray[np.int64], num_calls: NDArray[np.int64] | int = 1
) -> tuple[PerRank, PerRank]:
    """Return operations and seconds of each rank, whose experts have so many rows each, [P, E], in one call or more."""
    works = [_works(at.costs, counts) for counts in pairs]
    flops = [sum(count * work.num_flops for count, work in each) for each in works]
    launches_s = np.array([launch_seconds(at.level, each) for each in works])
    calls = np.maximum(np.broadcast_to(num_calls, at.num_ranks), 1)
    more_s = _each(
        pairs.sum(axis=1) // calls, lambda rows: activations_s(at.level, at.costs, rows, at.rates.measured_rows)
    )
    return np.array(flops), launches_s + calls * more_s


def activations_s(level: MemoryLevel, costs: ModelCosts, num_pairs: float, measured_rows: int = MEASURED_ROWS) -> float:
    """Return what activations add to a call of a measured kernel that has too many rows for them to stay in the cache.

    With up to `measured_rows` it is part of the kernel's measured speed; beyond, if those were few.
    A row is read, written in the weights' format and read again; hidden units are written first; sums are cleared,
    added to and handed out.
    """
    shape, formats = costs.shape, costs.formats
    has_all = measured_rows > MEASURED_ROWS or num_pairs <= measured_rows
    if has_all or not processor_of(level).measured("experts", formats.matrices):
        return 0.0
    prepared, kept = formats.weight_bytes, formats.activation_bytes
    hidden_bytes = shape.hidden_size * (kept + 2 * prepared + 5 * kept)
    unit_bytes = 2 * kept + 2 * prepared
    return num_pairs * (hidden_bytes + shape.intermediate_size * unit_bytes) / level.read_bytes_per_s


def _works(costs: ModelCosts, counts: NDArray[np.int64]) -> list[tuple[int, Work]]:
    """Return what experts with so many rows each compute, [E], as numbers of experts that do the same."""
    different, numbers = np.unique(counts[counts > 0], return_counts=True)
    top_k = costs.shape.top_k
    return [
        (num, costs.experts(rows / top_k, 1)) for rows, num in zip(different.tolist(), numbers.tolist(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Moved:
    """Items that go from their tokens' ranks to those of the experts: how many of each rank, [P]."""

    chosen: NDArray[np.int64]  # of this rank's tokens
    arrived: NDArray[np.int64]  # at this rank's experts
    sent: NDArray[np.int64]  # of those, to others
    received: NDArray[np.int64]  # from others


def _moved(at: ParallelLayer, ranks: ExpertIds, *, is_once: bool) -> _Moved:
    """Count the choices that go to `ranks`, [T, K], or if it `is_once` those of a token for the same rank as one."""
    ordered = np.sort(ranks, axis=1)
    counts = np.ones(ordered.shape, bool)
    if is_once:
        counts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    is_remote = counts & (ordered != at.owners[:, None])

    def of_owners(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.bincount(at.owners, weights=chosen.sum(axis=1), minlength=at.num_ranks).astype(np.int64)

    def at_ranks(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.bincount(ordered[chosen], minlength=at.num_ranks)

    return _Moved(of_owners(counts), at_ranks(counts), of_owners(is_remote), at_ranks(is_remote))


def _each(values: PerRank | NDArray[np.int64], function: Callable[[float], float]) -> PerRank:
    """Return a function of each value, computed once for those that are equal."""
    different, where = np.unique(values, return_inverse=True)
    return np.array([function(value) for value in different.tolist()], float)[where]
