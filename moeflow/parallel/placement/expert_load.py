"""How many tokens each expert gets, as it was lately, and how unevenly that falls on the ranks of a placement."""

from __future__ import annotations

import numpy as np

from moeflow.core.errors import ConfigError
from moeflow.parallel.placement.placement import ExpertIds, ExpertPlacement, Loads


class LoadTracker:
    """An exponentially weighted mean of tokens a pass, for each layer and expert."""

    def __init__(self, num_layers: int, num_experts: int, half_life: float) -> None:
        """Weigh a pass half as much as one that came `half_life` passes later. Raises: ConfigError if that is not > 0.

        A mean of what came, not a decaying sum: it is right from the first pass on.
        """
        if not half_life > 0:
            raise ConfigError(f"a half-life of {half_life:g} passes keeps nothing: take one above 0")
        self._keep = 0.5 ** (1 / half_life)
        self._sums = np.zeros((num_layers, num_experts))
        self._counts = np.zeros((num_layers, num_experts))  # of this pass
        self._weight = 0.0

    def add_layer(self, layer: int, topk_ids: ExpertIds) -> None:
        """Count what a layer's router chose in this pass: expert ids [T, K] of all ranks' tokens."""
        self._counts[layer] += np.bincount(topk_ids.ravel(), minlength=self._counts.shape[1])

    def end_pass(self) -> None:
        """Let the pass count, and those before it less."""
        self._sums = self._keep * self._sums + self._counts
        self._weight = self._keep * self._weight + 1.0
        self._counts[:] = 0

    @property
    def loads(self) -> Loads:
        """Tokens a pass, [layers, E]; 0 before the first pass."""
        return self._sums / max(self._weight, 1.0)


def rank_loads(placement: ExpertPlacement, loads: Loads) -> Loads:
    """Return the load of each rank in each layer, [layers, P]; replicas share theirs evenly."""
    shared = np.zeros((len(placement.homes), placement.num_ranks))
    for layer, experts in enumerate(placement.homes):
        for expert, ranks in enumerate(experts):
            shared[layer, list(ranks)] += loads[layer, expert] / len(ranks)
    return shared


def imbalance(placement: ExpertPlacement, loads: Loads) -> Loads:
    """Return the largest load of a rank over the mean, for each layer; 1: all alike, P: one rank has it all."""
    shared = rank_loads(placement, loads)
    means = shared.mean(axis=1)
    uneven: Loads = np.divide(shared.max(axis=1), means, out=np.ones_like(means), where=means > 0)
    return uneven
