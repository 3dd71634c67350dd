"""How long an MoE layer takes in each layout of its experts, by formula: from how routers choose on average.

Layouts, volumes and rates are those of `parallel_costs.py`, but where that counts the experts of given tokens, here
stand expected values, the slowest rank's. From first principles: rows, volumes, experts reached, the roofline.
Approximate: the slowest of ranks that share chances is `expected_max` of independent ones; where the total is fixed, as
that of all pairs, their spread is widened by P / (P - 1), so that differences between ranks stay exact. Of a rank's
experts, the time is the larger of two, both a little too short: by skew, with rows as on average; by chance, with the
most experts and pairs that a rank is expected to get, rows alike. Padded baselines are no layouts to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Final

import numpy as np

from moeflow.core.parallel_config import SLICED
from moeflow.parallel.placement.layouts import (
    ADDED_LAYOUTS,
    CAPACITY,
    CAPACITY_DROPLESS,
    LAYOUTS,
    REPLICATED,
    place_experts,
)
from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.planner.costs.expected_routing import ExpectedRouting, Values, expected_max
from moeflow.planner.costs.model_costs import ModelCosts, Work
from moeflow.planner.costs.parallel_costs import RankedLayer, activations_s
from moeflow.planner.costs.roofline import launch_seconds, work_seconds


@dataclass(frozen=True, kw_only=True)
class ExpectedLayer(RankedLayer):
    """A layer and how its router is expected to choose."""

    num_tokens: int  # of all ranks together
    routing: ExpectedRouting

    @cached_property
    def most_tokens(self) -> int:
        """Tokens of the rank that has most."""
        return ceil(self.num_tokens / self.num_ranks)

    @property
    def route_s(self) -> float:
        """Seconds of the router."""
        return sum(
            work_seconds(self.level, work) for work in self.costs.until_experts(self.most_tokens)[1:]
        ) + self.choose_s(self.most_tokens)

    def even_s(self, num_pairs: float, distinct: float) -> float:
        """Return the seconds of so many pairs of a token and one of `distinct` experts, each with as many."""
        work = self.costs.experts(num_pairs / distinct / self.costs.shape.top_k, 1)
        return self._launch_s(self.costs, [(distinct, work)], num_pairs)

    def uneven_s(self, tokens: Values, costs: ModelCosts) -> float:
        """Return the seconds of experts that so many of the tokens may reach each, [E]: their rows as on average."""
        reached = 1 - (1 - self.routing.chances) ** tokens
        some = reached > 0
        pairs = tokens[some] * self.routing.chances[some]
        rows, where = np.unique(pairs / reached[some], return_inverse=True)
        numbers = np.bincount(where, weights=reached[some])
        top_k = costs.shape.top_k
        works = [(num, costs.experts(each / top_k, 1)) for each, num in zip(rows.tolist(), numbers, strict=True)]
        return self._launch_s(costs, works, float(pairs.sum()))

    def _launch_s(self, costs: ModelCosts, works: Sequence[tuple[float, Work]], num_pairs: float) -> float:
        return launch_seconds(self.level, works) + activations_s(self.level, costs, num_pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEstimate:
    """What a layout is expected to bring."""

    layout: str
    route_s: float
    exchange_s: float  # both ways, with putting rows in order
    experts_s: float
    experts_bytes: float  # of all layers, on the rank that has most
    fits: bool  # these

    @property
    def seconds(self) -> float:
        """Of the layer, until all ranks are done."""
        return self.route_s + self.exchange_s + self.experts_s


def estimate_layouts(at: ExpectedLayer, added: Sequence[str] = ()) -> dict[str, LayoutEstimate]:
    """Return each layout that can be chosen, by name: moeflow's own, and those of other packages that are named.

    Raises: ConfigError if one of these cannot be used.
    """
    return {layout: _estimate(at, layout) for layout in (*CHOICES, *added)}


def _estimate(at: ExpectedLayer, layout: str) -> LayoutEstimate:
    experts_s, exchange_s, held = _UNPLACED[layout](at) if layout in _UNPLACED else _as_placed(layout, at)
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
    counted = np.full(num_experts, float(tokens))
    mean, variance = at.routing.distinct(counted)
    num_busy = min(at.num_ranks, at.num_tokens)
    distinct = expected_max(np.full(num_busy, mean), np.full(num_busy, variance), is_any=True)
    experts_s = max(at.even_s(tokens * at.costs.shape.top_k, distinct), at.uneven_s(counted, at.costs))
    return experts_s, 0.0, num_experts


def _sliced(at: ExpectedLayer) -> Parts:
    """All ranks compute all tokens; widths differ by one at most."""
    shape, tokens = at.costs.shape, at.num_tokens
    width = ceil(shape.intermediate_size / at.num_ranks)
    costs = replace(at.costs, shape=replace(shape, intermediate_size=width))
    experts_s = uneven_experts_s(at, costs)
    exchange_s = at.gather_all_s(tokens, at.choice_bytes) + 2 * at.gather_all_s(tokens, at.row_bytes)
    copy_s = at.copy_s(tokens + at.num_ranks * at.most_tokens)
    return experts_s, exchange_s + float(copy_s), shape.num_experts * width / shape.intermediate_size


def _as_placed(layout: str, at: ExpectedLayer) -> Parts:
    """A token goes once to each rank that has some of its experts, and the results of its experts come back."""
    placement = place_experts(layout, at.routing.chances[None], at.num_ranks)
    served = _served(placement, at.costs.shape.num_experts)
    return placed_experts_s(at, placement), _exchange_s(at, served), float((served > 0).sum(axis=1).max())


def placed_experts_s(at: ExpectedLayer, placement: ExpertPlacement) -> float:
    """Return the seconds of whole experts on the rank that takes longest."""
    served = _served(placement, at.costs.shape.num_experts)
    even_s = at.even_s(_most_pairs(at, served), _most_distinct(at, served))
    on_average_s = max(at.uneven_s(at.num_tokens * each, at.costs) for each in np.unique(served, axis=0))
    return max(even_s, on_average_s)


def uneven_experts_s(at: ExpectedLayer, costs: ModelCosts) -> float:
    """Return the seconds of all experts on one rank, as `costs` has them, for all tokens."""
    return at.uneven_s(np.full(costs.shape.num_experts, float(at.num_tokens)), costs)


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


def _exchange_s(at: ExpectedLayer, served: Values) -> float:
    """Return the seconds of sending tokens and getting results, rows that are put in order included."""
    reached = at.routing.reached(served)
    own_pairs = at.most_tokens * at.costs.shape.top_k
    rows = _Moved.of(at, reached, reached * (1 - reached))
    results = _Moved.of(at, *_each_rank(served, at.routing.pairs))
    most = rows.most(is_shared=at.link is None)
    dispatch_s = at.exchange_s(most, np.zeros(1)) + at.exchange_s(most, np.zeros(1), at.choice_bytes)
    combine_s = at.exchange_s(results.most(is_shared=at.link is None), np.zeros(1))
    copied = at.most_tokens * reached.sum() + rows.most_arrived + results.most_arrived + 2 * own_pairs
    return float((dispatch_s + combine_s)[0] + at.copy_s(copied))


@dataclass(frozen=True, slots=True)
class _Moved:
    """Items that go from their tokens' ranks to those of the experts: means and variances of each rank, [P]."""

    sent: tuple[Values, Values]  # to others
    received: tuple[Values, Values]  # from others
    most_arrived: float  # at a rank, its own included

    @classmethod
    def of(cls, at: ExpectedLayer, per_token: Values, variance: Values) -> _Moved:
        """Take how many items of a token each rank gets: mean and variance, [P].

        Those that are sent vary as a token's own rank gets more or fewer, and, of tokens that go once to a rank, as
        experts share one: about as often as they do on average, or as ranks get some if that is less.
        """
        tokens = at.num_tokens // at.num_ranks + (np.arange(at.num_ranks) < at.num_tokens % at.num_ranks)
        shared = max(min(at.costs.shape.top_k - per_token.sum(), variance.sum()), 0.0)
        others = at.num_tokens - tokens
        arrived = expected_max(at.num_tokens * per_token, at.num_tokens * variance, is_any=True)
        sent = tokens * (per_token.sum() - per_token), tokens * (variance + shared)
        return cls(sent, (others * per_token, others * variance), arrived)

    def most(self, *, is_shared: bool) -> Values:
        """Return the most that a rank sends or receives, [1]; `is_shared`: sends and receives, one after the other."""
        if is_shared:
            return np.array([expected_max(self.sent[0] + self.received[0], self.sent[1] + self.received[1])])
        means, variances = (np.concatenate(both) for both in zip(self.sent, self.received, strict=True))
        return np.array([expected_max(means, variances)])


_UNPLACED: Final[Mapping[str, Callable[[ExpectedLayer], Parts]]] = {REPLICATED: _replicated, SLICED: _sliced}
CHOICES: Final = tuple(name for name in LAYOUTS if name not in (CAPACITY, CAPACITY_DROPLESS, *ADDED_LAYOUTS))
