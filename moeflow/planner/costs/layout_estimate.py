"""How long an MoE layer takes in each layout of its experts, by formula: from how routers choose on average.

Layouts, volumes and rates are those of `parallel_costs.py`, but where that counts the experts of given tokens, here
stand expected values: of each section, the slowest rank's. From first principles: rows, volumes, experts reached, the
roofline. Approximate: the slowest of ranks that share chances is `expected_max` of independent ones; where the total is
fixed, as that of all pairs, their spread is widened by P / (P - 1), so that differences between ranks stay exact. The
padded baseline is no layout to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Final

import numpy as np

from moeflow.core.hardware import Link, MemoryLevel
from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.planner.costs.expected_routing import ExpectedRouting, Values, expected_max
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.parallel_costs import COUNT_BYTES
from moeflow.planner.costs.roofline import work_seconds


@dataclass(frozen=True, kw_only=True)
class ExpectedLayer:
    """One MoE layer on ranks that are alike, and how its router is expected to choose."""

    level: MemoryLevel  # where a rank computes
    link: Link  # from a rank to all others, in each direction
    costs: ModelCosts
    num_ranks: int
    num_tokens: int  # of all ranks together
    routing: ExpectedRouting

    @cached_property
    def most_tokens(self) -> int:
        """Tokens of the rank that has most."""
        return ceil(self.num_tokens / self.num_ranks)

    @property
    def row_bytes(self) -> int:
        """A token's hidden state."""
        return self.costs.shape.hidden_size * self.costs.formats.activation_bytes

    @property
    def route_s(self) -> float:
        """Seconds of the router."""
        return work_seconds(self.level, self.costs.router(self.most_tokens))

    def experts_s(self, num_pairs: float, distinct: float, width: int | None = None) -> float:
        """Return the seconds of so many pairs of a token and one of `distinct` experts, or of slices that wide."""
        shape = self.costs.shape
        sliced = replace(self.costs, shape=replace(shape, intermediate_size=width or shape.intermediate_size))
        return work_seconds(self.level, sliced.experts(num_pairs / shape.top_k, distinct))

    def messages_s(self, num_rows: float) -> float:
        """Return the seconds in which a rank sends or receives so many rows, about as many to or from each other."""
        num_messages = min(self.num_ranks - 1, num_rows)
        num_bytes = num_rows * self.row_bytes
        return self.link.seconds(num_bytes, num_bytes / num_messages) if num_messages else 0.0

    def ring_s(self, chunk_bytes: float) -> float:
        """Return the seconds of an all-gather, or reduce-scatter, in P-1 steps of a chunk each."""
        return self.link.seconds(chunk_bytes * (self.num_ranks - 1), chunk_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEstimate:
    """What a layout is expected to bring."""

    layout: str
    route_s: float
    exchange_s: float  # both ways, counts included
    experts_s: float
    experts_bytes: float  # of all layers, on the rank that has most
    fits: bool  # these

    @property
    def seconds(self) -> float:
        """Of the layer, until all ranks are done."""
        return self.route_s + self.exchange_s + self.experts_s


def estimate_layouts(at: ExpectedLayer) -> dict[str, LayoutEstimate]:
    """Return each layout that can be chosen, by name."""
    return {layout: _estimate(at, layout) for layout in CHOICES}


def _estimate(at: ExpectedLayer, layout: str) -> LayoutEstimate:
    experts_s, exchange_s, held = CHOICES[layout](at)
    num_bytes = held * at.costs.expert_bytes * at.costs.num_moe_layers
    return LayoutEstimate(
        layout=layout,
        route_s=at.route_s,
        exchange_s=exchange_s,
        experts_s=experts_s,
        experts_bytes=num_bytes,
        fits=num_bytes <= at.level.capacity_bytes,
    )


Parts = tuple[float, float, float]  # seconds of experts, seconds of exchanging, experts that a rank holds of a layer


def _replicated(at: ExpectedLayer) -> Parts:
    """Ranks with tokens compute them on their own."""
    num_experts, tokens = at.costs.shape.num_experts, at.most_tokens
    mean, variance = at.routing.distinct(np.full(num_experts, float(tokens)))
    num_busy = min(at.num_ranks, at.num_tokens)
    distinct = expected_max(np.full(num_busy, mean), np.full(num_busy, variance), is_any=True)
    return at.experts_s(tokens * at.costs.shape.top_k, distinct), 0.0, num_experts


def _sliced(at: ExpectedLayer) -> Parts:
    """All ranks compute all tokens; widths differ by one at most."""
    shape = at.costs.shape
    width = ceil(shape.intermediate_size / at.num_ranks)
    distinct, _ = at.routing.distinct(np.full(shape.num_experts, float(at.num_tokens)))
    exchange_s = at.ring_s(shape.num_experts * COUNT_BYTES) + 2 * at.ring_s(at.most_tokens * at.row_bytes)
    experts_s = at.experts_s(at.num_tokens * shape.top_k, distinct, width)
    return experts_s, exchange_s, shape.num_experts * width / shape.intermediate_size


def _expert(at: ExpectedLayer) -> Parts:
    return _placed(at, ExpertPlacement.by_index(1, at.costs.shape.num_experts, at.num_ranks))


def _expert_by_load(at: ExpectedLayer) -> Parts:
    slots = ceil(at.costs.shape.num_experts / at.num_ranks) + 1
    return _placed(at, ExpertPlacement.by_load(at.routing.chances[None], at.num_ranks, slots))


def _placed(at: ExpectedLayer, placement: ExpertPlacement) -> Parts:
    """A token goes once to each rank that has some of its experts, and comes back."""
    served = _served(placement, at.costs.shape.num_experts)
    exchange_s = 2 * at.messages_s(_most_rows(at, served))
    experts_s = at.experts_s(_most_pairs(at, served), _most_distinct(at, served))
    return experts_s, exchange_s, float((served > 0).sum(axis=1).max())


def _served(placement: ExpertPlacement, num_experts: int) -> Values:
    """Return the share of each expert's tokens that each rank computes, [P, E]."""
    served = np.zeros((placement.num_ranks, num_experts))
    for expert, ranks in enumerate(placement.homes[0]):
        served[list(ranks), expert] = 1 / len(ranks)
    return served


def _most_pairs(at: ExpectedLayer, served: Values) -> float:
    """Return the pairs of the rank that has most; all ranks together always have as many."""
    means, variances = _each_rank(served, at.routing.pairs)
    widened = variances * at.num_ranks / max(at.num_ranks - 1, 1)
    return expected_max(at.num_tokens * means, at.num_tokens * widened, is_any=True)


def _most_distinct(at: ExpectedLayer, served: Values) -> float:
    """Return the experts that tokens reach on the rank where they are most.

    The spread is that of differences between ranks: what all ranks together vary by makes none of them slower.
    """
    means, variances = _each_rank(served, lambda share: at.routing.distinct(at.num_tokens * share))
    if at.num_ranks == 1 or not variances.sum():
        return expected_max(means, variances, is_any=True)
    _, of_all = at.routing.distinct(np.full(served.shape[1], float(at.num_tokens)))
    own = 1 - of_all / at.num_ranks / variances.sum()
    widened = variances * max(own, 0.0) * at.num_ranks / (at.num_ranks - 1)
    return expected_max(means, widened, is_any=True)


def _each_rank(served: Values, count: Callable[[Values], tuple[float, float]]) -> tuple[Values, Values]:
    """Return mean and variance of a count of each rank, [P] both."""
    moments = np.array([count(row) for row in served])
    return moments[:, 0], moments[:, 1]


def _most_rows(at: ExpectedLayer, served: Values) -> float:
    """Return the rows that the rank with most of them sends, or receives.

    Exact means and, of received rows, spread. Sent rows vary as a token's own rank is among those it reaches or not,
    and as experts share a rank: about as often as they do on average, or as ranks are reached if that is less.
    """
    reached = at.routing.reached(served)
    tokens = at.num_tokens // at.num_ranks + (np.arange(at.num_ranks) < at.num_tokens % at.num_ranks)
    own = reached * (1 - reached)
    shared = min(at.costs.shape.top_k - reached.sum(), own.sum())
    means = np.concatenate([tokens * (reached.sum() - reached), (at.num_tokens - tokens) * reached])
    variances = np.concatenate([tokens * (own + shared), (at.num_tokens - tokens) * own])
    return expected_max(means, variances)


CHOICES: Final[Mapping[str, Callable[[ExpectedLayer], Parts]]] = {
    "replicated": _replicated,
    "expert": _expert,
    "expert-by-load": _expert_by_load,
    "sliced": _sliced,
}
