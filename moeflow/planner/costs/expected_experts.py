"""Seconds of one layer's experts on the rank that takes longest, for routers whose chances are known.

Approximate: expected values stand for counts. The time is the larger of two, both a little too short. By skew, each
expert has its average rows. By chance, a rank has the largest expected numbers of experts and pairs, all rows alike.
Ranks share chances, but `expected_max` takes them as independent. If the total of all ranks is fixed, their spread is
widened by P / (P - 1). So differences between ranks are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from moeflow.core.hardware import MemoryLevel
from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.planner.costs.expected_routing import ExpectedRouting, Values, expected_max
from moeflow.planner.costs.model_costs import KernelWork, ModelCosts
from moeflow.planner.costs.roofline import launch_seconds, processor_of

MEASURED_ROWS: Final = 512  # of a call: a kernel's measured speed includes its activations up to here


@dataclass(frozen=True, kw_only=True)
class ExpectedExperts:
    """The experts of a layer on ranks that are alike, and the tokens of all ranks."""

    level: MemoryLevel  # where a rank computes
    costs: ModelCosts
    num_ranks: int
    num_tokens: int
    routing: ExpectedRouting

    def placed_s(self, placement: ExpertPlacement) -> float:
        """Return the seconds of whole experts on their ranks."""
        served = self.served(placement)
        even_s = self.even_s(self._most_pairs(served), self._most_distinct(served))
        on_average_s = max(self.uneven_s(self.num_tokens * each) for each in np.unique(served, axis=0))
        return max(even_s, on_average_s)

    def all_s(self) -> float:
        """Return the seconds of all experts for all tokens on each rank."""
        return self.uneven_s(np.full(self.costs.shape.routing.num_experts, float(self.num_tokens)))

    def served(self, placement: ExpertPlacement) -> Values:
        """Return the share of each expert's tokens that each rank computes, [P, E]."""
        served = np.zeros((placement.num_ranks, self.costs.shape.routing.num_experts))
        for expert, ranks in enumerate(placement.homes[0]):
            served[list(ranks), expert] = 1 / len(ranks)
        return served

    def even_s(self, num_pairs: float, distinct: float) -> float:
        """Return the seconds of pairs of a token and an expert, where each of `distinct` experts has as many."""
        work = self.costs.experts(num_pairs / distinct / self.costs.shape.routing.top_k, 1)
        return self._launch_s([(distinct, work)], num_pairs)

    def uneven_s(self, tokens: Values) -> float:
        """Return the seconds of experts with their average rows, if so many tokens may reach each, [E]."""
        reached = 1 - (1 - self.routing.chances) ** tokens
        some = reached > 0
        pairs = tokens[some] * self.routing.chances[some]
        rows, where = np.unique(pairs / reached[some], return_inverse=True)
        numbers = np.bincount(where, weights=reached[some])
        top_k = self.costs.shape.routing.top_k
        works = [(num, self.costs.experts(each / top_k, 1)) for each, num in zip(rows.tolist(), numbers, strict=True)]
        return self._launch_s(works, float(pairs.sum()))

    def _launch_s(self, works: Sequence[tuple[float, KernelWork]], num_pairs: float) -> float:
        return launch_seconds(self.level, works) + activations_s(self.level, self.costs, num_pairs)

    def _most_pairs(self, served: Values) -> float:
        """Return the pairs of the rank that has most; the total of all ranks is fixed."""
        means, variances = each_rank(served, self.routing.pairs)
        widened = variances * self.num_ranks / max(self.num_ranks - 1, 1)
        return expected_max(self.num_tokens * means, self.num_tokens * widened, is_any=True)

    def _most_distinct(self, served: Values) -> float:
        """Return the experts that tokens reach on the rank with most of them.

        The spread is that of differences between ranks: a variation common to all ranks makes none of them slower.
        """
        means, variances = each_rank(served, lambda share: self.routing.distinct(self.num_tokens * share))
        if self.num_ranks == 1 or not variances.sum():
            return expected_max(means, variances, is_any=True)
        _, of_all = self.routing.distinct(np.full(served.shape[1], float(self.num_tokens)))
        own = 1 - of_all / self.num_ranks / variances.sum()
        widened = variances * max(own, 0.0) * self.num_ranks / (self.num_ranks - 1)
        return expected_max(means, widened, is_any=True)


def each_rank(served: Values, count: Callable[[Values], tuple[float, float]]) -> tuple[Values, Values]:
    """Return mean and variance of a count of each rank, [P] both."""
    moments = np.array([count(row) for row in served])
    return moments[:, 0], moments[:, 1]


def activations_s(level: MemoryLevel, costs: ModelCosts, num_pairs: float, measured_rows: int = MEASURED_ROWS) -> float:
    """Return the seconds that activations add to a call of a measured kernel with too many rows for the cache.

    Up to `measured_rows` they are part of the kernel's measured speed, and beyond, if many rows were measured. A row
    is read, written in the weights' format and read again. Hidden units are written first; sums are cleared, added to
    and returned.
    """
    shape, formats = costs.shape, costs.formats
    has_all = measured_rows > MEASURED_ROWS or num_pairs <= measured_rows
    if has_all or not processor_of(level).measured("experts", formats.matrices):
        return 0.0
    prepared, kept = formats.weight_bytes, formats.activation_bytes
    hidden_bytes = shape.hidden_size * (kept + 2 * prepared + 5 * kept)
    unit_bytes = 2 * kept + 2 * prepared
    return num_pairs * (hidden_bytes + shape.feed_forward.intermediate_size * unit_bytes) / level.read_bytes_per_s
