"""Whom to evict while a pass goes over nearly all experts, layer after layer.

A policy looks back, and there that is wrong: what was used longest ago is what the next pass begins with, so that a
cache that is smaller than the model finds nothing in it. What is needed last is what has just been used. That goes
first, but each layer keeps an equal share of the slots with its best experts by the policy: the next pass finds them,
and has something to compute in every layer while the others are read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeflow.experts.cache.eviction import Scores


class Scan:
    """Where a pass is, and what its layers may keep."""

    def __init__(self, num_layers: int, num_experts: int, *, num_kept: int) -> None:
        """`num_kept` experts of all layers together stay when the pass is over."""
        self.layer = 0  # that is computed now
        self._num_experts = num_experts
        self._kept_of_layer = num_kept // num_layers

    def victim(
        self, evictable: NDArray[np.bool_], held: NDArray[np.int64], scores: Scores, *, for_demand: bool
    ) -> int | None:
        """Return an evictable expert; None if only those are left that the pass has yet to come to.

        For demand one of these has to go then, of the layer furthest ahead.

        Shapes: evictable and scores [experts of all layers], held [layers], how many experts of each have a slot.
        """
        by_layer = evictable.reshape(len(held), self._num_experts)
        past = by_layer[: self.layer + 1]
        crowded = past & (held[: self.layer + 1] > self._kept_of_layer)[:, np.newaxis]
        for candidates in (crowded, past):
            if candidates.any():
                return int(np.argmin(np.where(candidates.ravel(), scores[: candidates.size], np.inf)))
        if not for_demand or not evictable.any():
            return None
        layer = int(np.flatnonzero(by_layer.any(axis=1))[-1])
        first, end = layer * self._num_experts, (layer + 1) * self._num_experts
        return first + int(np.argmin(np.where(evictable[first:end], scores[first:end], np.inf)))
