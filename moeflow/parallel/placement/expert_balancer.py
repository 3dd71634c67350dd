"""When experts change ranks while a model is served: placements follow the loads, in small steps.

Every rank holds the same balancer and sees the same choices of routers, so all decide alike without talking. An expert
moves between two passes; until then the old placement serves. Moves are few a pass, and begin only where they gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from moeflow.parallel.placement.expert_load import LoadTracker, imbalance, rank_loads
from moeflow.parallel.placement.placement import ExpertIds, ExpertPlacement, Loads, ServingTable
from moeflow.parallel.placement.rebalancing import ReplicaMove, apply_moves, moves
from moeflow.parallel.placement.whole_experts import WholeExperts

CHECK_PASSES: Final = 64  # passes between two looks at the loads
HALF_LIFE_PASSES: Final = 256.0  # of the loads
MIN_GAIN: Final = 0.1  # of the mean load, that the fullest rank of a layer must lose for a move to be worth it
MAX_MOVES: Final = 2  # a pass: some milliseconds of copying


class ExpertBalancer:
    """The placement of a model's experts on ranks."""

    def __init__(self, experts: WholeExperts) -> None:
        """Take the first placement, and the function that chooses later ones."""
        self.placement = experts.at_first
        num_layers, num_ranks = len(self.placement.homes), self.placement.num_ranks
        self.num_moves = 0  # so far
        self.num_held = self.placement.num_held()
        self.imbalance = 0.0  # when loads were looked at last: the largest of a rank over the mean, the mean of layers
        self.rank_loads = [0.0] * num_ranks  # likewise, tokens a pass, the mean of layers
        self._experts = experts
        self._tracker = LoadTracker(num_layers, experts.num_experts, HALF_LIFE_PASSES)
        self._target = self.placement
        self._passes = 0
        self._tables = [ServingTable(experts) for experts in self.placement.homes]

    def serving_ranks(self, layer: int, topk_ids: ExpertIds) -> ExpertIds:
        """Return which rank computes each of a layer's pairs in this pass. Shapes: topk_ids [T, K] -> [T, K]."""
        self._tracker.add_layer(layer, topk_ids)
        return self._tables[layer].ranks(topk_ids)

    def end_pass(self) -> list[ReplicaMove]:
        """Return the steps to take before the next pass; `switch` is called when the copies are complete."""
        self._tracker.end_pass()
        self._passes += 1
        if self._passes % CHECK_PASSES == 0:
            self._look()
        if self._target is self.placement:  # nearly always: comparing all homes would cost every pass milliseconds
            return []
        steps = moves(self.placement, self._target, MAX_MOVES)
        if not steps:
            self._target = self.placement
        return steps

    def switch(self, steps: Sequence[ReplicaMove]) -> None:
        """Go on with the placement that some steps lead to."""
        self.placement = apply_moves(self.placement, steps)
        for layer in {step.layer for step in steps}:
            self._tables[layer] = ServingTable(self.placement.homes[layer])
        self.num_moves += len(steps)
        self.num_held = self.placement.num_held()

    def _look(self) -> None:
        loads = self._tracker.loads
        self.imbalance = float(np.mean(imbalance(self.placement, loads)))
        self.rank_loads = rank_loads(self.placement, loads).mean(axis=0).tolist()
        if self._experts.place is not None:
            self._target = self._better(loads, self._experts.place(loads))

    def _better(self, loads: Loads, wanted: ExpertPlacement) -> ExpertPlacement:
        """Return the placement with new places for layers that gain enough and fit the ranks' memory."""
        gains = imbalance(self.placement, loads) - imbalance(wanted, loads)
        homes = tuple(
            new if gain >= MIN_GAIN and self._experts.fits(wanted, layer) else old
            for layer, (gain, old, new) in enumerate(zip(gains, self.placement.homes, wanted.homes, strict=True))
        )
        return ExpertPlacement(self.placement.num_ranks, homes)
