"""Chooses the expert to evict: by a policy that looks back, or in a scan by the needs of the pass.

A scan is a pass that needs nearly all experts, layer after layer. There, a policy is wrong: the next pass needs the
least recently used expert first, so a cache smaller than the model would never hit. The experts that the pass has
just used are needed last, so they are evicted first.

But each layer keeps an equal share of the slots for its best experts by the policy. So the next pass has experts to
compute with in every layer while it reads the others.
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
    """The position of a scan, and the experts that it keeps."""

    layer: int  # under computation
    kept_of_layer: int  # experts of each layer that remain for later passes


class EvictionSelector:
    """The choice among the experts of all layers, over the passes."""

    def __init__(self, policy: EvictionPolicy, num_layers: int, num_experts: int) -> None:
        """`num_experts` is the number in a layer."""
        self.scan: Scan | None = None  # None: the pass needs few experts
        self.uses: LFU | None = None  # counts uses, from the first `use_counts` on
        self._policy = policy
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._now = 0

    def begin_pass(self) -> None:
        """Count a pass: the unit of age for policies."""
        self._now += 1
        self.scan = None

    def scan_at(self, layer: int, *, num_kept: int) -> None:
        """Look ahead from this layer on, until the next pass; keep `num_kept` experts of all layers for that pass."""
        if self.scan is None:
            self.scan = Scan(layer, num_kept // self._num_layers)
        self.scan.layer = layer

    def on_use(self, numbers: NDArray[np.int64]) -> None:
        """Receive the experts that the pass needs."""
        self._policy.on_use(numbers, self._now)
        if self.uses is not None:
            self.uses.on_use(numbers, self._now)

    def use_counts(self) -> Scores:
        """Return the decayed number of uses of each expert since the first call."""
        if self.uses is None:
            self.uses = LFU(self._num_layers * self._num_experts)
        return self.uses.counts(self._now)

    def on_load(self, number: int) -> None:
        """Receive an expert that got a slot."""
        self._policy.on_load(number)

    def best_first(self, layer: int) -> list[int]:
        """Return a layer's experts by falling score; equal ones in the order on disk."""
        first, end = layer * self._num_experts, (layer + 1) * self._num_experts
        order: list[int] = np.argsort(-self._policy.scores(self._now)[first:end], kind="stable").tolist()
        return order

    def worth(self, states: ExpertStates) -> Worth:
        """Return the worth of experts for the rest of a pass outside of scans. Awaited experts may not leave yet."""
        used, unused = self._policy.scores_behind(self._now)
        may_leave = np.where(states.awaited, MayLeave.BEHIND, MayLeave.NOW)
        may_leave[states.present & ~states.evictable] = MayLeave.NEVER
        return Worth(self._policy.scores(self._now), used, unused, may_leave.astype(np.uint8))

    def choose(self, states: ExpertStates, *, for_demand: bool) -> int | None:
        """Return the expert to evict, or None. Awaited experts are evicted for demand only, and last."""
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
    """Return the expert that a scan evicts, of a layer that the pass has reached; None if there is none.

    For demand, an expert of the layer furthest ahead is returned instead of None.

    Shapes: evictable and scores [experts of all layers]; num_held [layers], the number of each layer's slots.
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
