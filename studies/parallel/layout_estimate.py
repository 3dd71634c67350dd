"""Expected seconds of an MoE layer in each layout of its experts, from the chances of its routers.

`layer_cost.py` prices the layouts. The counts of the slowest rank come from `ExpectedRouting`. The padded baselines
are no layouts to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from moeflow.planner.costs.expected_experts import ExpectedExperts, each_rank
from moeflow.planner.costs.expected_routing import Values, expected_max
from studies.parallel.layer_cost import (
    Experts,
    LayerCost,
    Moved,
    PerRank,
    RankedLayer,
    placed_cost,
    replicated_cost,
    sliced_cost,
)
from studies.parallel.router_chances import reached_ranks

CHOICES: Final = tuple(name for name in LAYOUTS if name not in (CAPACITY, CAPACITY_DROPLESS, *ADDED_LAYOUTS))


@dataclass(frozen=True, kw_only=True)
class ExpectedLayer(RankedLayer, ExpectedExperts):
    """A layer and the chances of its router. Most figures are those of the slowest rank, [1]."""

    @property
    def own_tokens(self) -> PerRank:
        """Tokens of the rank that has most, [1]."""
        return np.array([ceil(self.num_tokens / self.num_ranks)])

    def cost(self, layout: str) -> LayerCost:
        """Return the cost of a layout. Raises: ConfigError if it is another package's and cannot be used."""
        own_tokens = self.own_tokens
        if layout == REPLICATED:
            experts = Experts(own_tokens * self.routing.top_k, np.array([self._own_s(int(own_tokens.max()))]))
            return replicated_cost(self, own_tokens, experts)
        if layout == SLICED:
            return sliced_cost(self, own_tokens, self.num_tokens, lambda costs: replace(self, costs=costs).all_s())
        placement = place_experts(layout, self.routing.chances[None], self.num_ranks)
        served = self.served(placement)
        pairs, reached = each_rank(served, self.routing.pairs), reached_ranks(self.routing, served)
        experts = Experts(self.num_tokens * pairs[0], np.array([self.placed_s(placement)]))
        rows, results = self._moved(reached, reached * (1 - reached)), self._moved(*pairs)
        return placed_cost(self, own_tokens, placement, experts, rows, results)

    def _own_s(self, num_tokens: int) -> float:
        """Return the seconds of all experts on each rank, for at most so many tokens of its own."""
        tokens = np.full(self.costs.shape.routing.num_experts, float(num_tokens))
        mean, variance = self.routing.distinct(tokens)
        num_busy = min(self.num_ranks, self.num_tokens)
        distinct = expected_max(np.full(num_busy, mean), np.full(num_busy, variance), is_any=True)
        return max(self.even_s(num_tokens * self.routing.top_k, distinct), self.uneven_s(tokens))

    def _moved(self, per_token: Values, variance: Values) -> Moved:
        """Return the expected items of all tokens, if each rank gets so many items of a token: mean and variance, [P].

        The number that a rank sends varies with the items that stay on it. Where a token goes to a rank once,
        experts that share a rank add variance: their average number, or the items' variance if it is less.
        """
        tokens = self.num_tokens // self.num_ranks + (np.arange(self.num_ranks) < self.num_tokens % self.num_ranks)
        shared = max(min(self.costs.shape.routing.top_k - per_token.sum(), variance.sum()), 0.0)
        others = self.num_tokens - tokens
        sent = tokens * (per_token.sum() - per_token), tokens * (variance + shared)
        received = others * per_token, others * variance
        if self.link is None:
            most = expected_max(sent[0] + received[0], sent[1] + received[1])
        else:
            means, variances = (np.concatenate(both) for both in zip(sent, received, strict=True))
            most = expected_max(means, variances)
        arrived = expected_max(self.num_tokens * per_token, self.num_tokens * variance, is_any=True)
        return Moved(self.own_tokens * per_token.sum(), np.array([arrived]), sent[0], received[0], np.array([most]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEstimate:
    """The expected cost of a layout."""

    layout: str
    route_s: float
    exchange_s: float  # both ways, with the copies of rows
    experts_s: float
    experts_bytes: float  # of all layers, on the rank that has most
    fits: bool  # these bytes

    @property
    def seconds(self) -> float:
        """Of the layer, until all ranks are done."""
        return self.route_s + self.exchange_s + self.experts_s


def estimate_layouts(at: ExpectedLayer, added: Sequence[str] = ()) -> dict[str, LayoutEstimate]:
    """Return each layout that can be chosen, by name: moeflow's own, and the named ones of other packages.

    Raises: ConfigError if one of these cannot be used.
    """
    return {layout: _estimate(at, layout, at.cost(layout)) for layout in (*CHOICES, *added)}


def _estimate(at: ExpectedLayer, layout: str, cost: LayerCost) -> LayoutEstimate:
    seconds = {name: float(times.max()) for name, times in cost.sections.items()}
    route_s, exchange_s = (
        float(at.route_s(at.own_tokens).max()),
        seconds.get("dispatch", 0.0) + seconds.get("combine", 0.0),
    )
    num_bytes = float(cost.weight_bytes.max()) * at.costs.num_moe_layers
    return LayoutEstimate(
        layout=layout,
        route_s=route_s,
        exchange_s=exchange_s,
        experts_s=sum(seconds.values()) - exchange_s - route_s,
        experts_bytes=num_bytes,
        fits=num_bytes <= at.level.capacity_bytes,
    )
