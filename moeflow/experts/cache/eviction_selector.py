"""Which expert is evicted: the worst by a policy that looks back, or in a scan by what the pass needs next.

A scan is a pass that needs nearly all experts, layer after layer. There a policy is wrong: what was used longest ago is
what the next pass begins with, so that a cache smaller than the model would find nothing. What is needed last is what
has just been used. That goes first, but each layer keeps an equal share of the slots with its best experts by the
policy: the next pass finds them, and has something to compute in every layer while the others are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeflow.experts.cache.eviction import LFU, EvictionPolicy, Scores, lowest
from moeflow.experts.cache.expert_states import ExpertStates
from moeflow.experts.cache.worth import MayLeave, Worth


@dataclass(slots=True)
class Scan:
    """Where a scan is, and what it leaves."""

    layer: int  # that is computed now
    kept_of_layer: int  # experts of each layer that stay for later passes


class EvictionSelector:
    """The choice among the experts of all layers, over the passes."""

    def __init__(self, policy: EvictionPolicy, num_layers: int, num_experts: int) -> None:
        """`num_experts` is the number in a layer."""
        self.scan: Scan | None = None  # None: the pass needs few experts
        self.uses: LFU | None = None  # counts them, if somebody wants to know
        self._policy = policy
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._now = 0

    def begin_pass(self) -> None:
        """Count a pass: the unit of age for policies."""
        self._now += 1
        self.scan = None

    def scan_at(self, layer: int, *, num_kept: int) -> None:
        """Look ahead from this layer until the next pass begins; `num_kept` experts of all layers are for that one."""
        if self.scan is None:
            self.scan = Scan(layer, num_kept // self._num_layers)
        self.scan.layer = layer

    def on_use(self, numbers: NDArray[np.int64]) -> None:
        """Receive the experts that the pass needs."""
        self._policy.on_use(numbers, self._now)
        if self.uses is not None:
            self.uses.on_use(numbers, self._now)

    def use_counts(self) -> Scores:
        """Return how often each expert was used since this was first asked, old uses counting less."""
        if self.uses is None:
            self.uses = LFU(self._num_layers * self._num_experts)
        return self.uses.counts(self._now)

    def on_load(self, number: int) -> None:
        """Receive an expert that got a slot."""
        self._policy.on_load(number)

    def best_first(self, layer: int) -> list[int]:
        """Return a layer's experts, those of the highest score first, of equal ones as they lie on disk."""
        first, end = layer * self._num_experts, (layer + 1) * self._num_experts
        order: list[int] = np.argsort(-self._policy.scores(self._now)[first:end], kind="stable").tolist()
        return order

    def worth(self, states: ExpertStates) -> Worth:
        """Return what decides who is evicted in the rest of the pass, outside of a scan; what is awaited is not yet."""
        used, unused = self._policy.scores_behind(self._now)
        may_leave = np.where(states.awaited, MayLeave.BEHIND, MayLeave.NOW)
        may_leave[states.present & ~states.evictable] = MayLeave.NEVER
        return Worth(self._policy.scores(self._now), used, unused, may_leave.astype(np.uint8))

    def choose(self, states: ExpertStates, *, for_demand: bool) -> int | None:
        """Return the expert to evict, None if there is none: what is awaited goes for demand only, and last."""
        candidates = states.evictable & ~states.awaited
        if for_demand and not candidates.any():
            candidates = states.evictable
        if not candidates.any():
            return None
        scores = self._policy.scores(self._now)
        if self.scan is None:
            return lowest(scores, candidates)
        return scan_victim(self.scan, candidates, states.num_held, scores, for_demand=for_demand)


def scan_victim(
    scan: Scan, evictable: NDArray[np.bool_], num_held: NDArray[np.int64], scores: Scores, *, for_demand: bool
) -> int | None:
    """Return the expert that a scan evicts; None if there are only those of layers that the pass has yet to reach.

    For demand one of these is returned then, of the layer furthest ahead.

    Shapes: evictable and scores [experts of all layers], num_held [layers], the experts of each that have a slot.
    """
    by_layer = evictable.reshape(len(num_held), -1)
    past = by_layer[: scan.layer + 1]
    crowded = past & (num_held[: scan.layer + 1] > scan.kept_of_layer)[:, np.newaxis]
    for candidates in (crowded, past):
        if candidates.any():
            return lowest(scores[: candidates.size], candidates.ravel())
    if not for_demand or not evictable.any():
        return None
    layer = int(np.flatnonzero(by_layer.any(axis=1))[-1])
    first, end = layer * by_layer.shape[1], (layer + 1) * by_layer.shape[1]
    return first + lowest(scores[first:end], evictable[first:end])
