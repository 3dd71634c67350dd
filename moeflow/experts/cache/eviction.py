"""Eviction policies: each gives every expert a score, and the lowest score is evicted.

Experts are numbered from 0 over all layers. A policy receives every use and every load, also of absent experts. It
knows neither slots nor the experts that may be evicted now. Scores are arrays: choosing among thousands takes
microseconds, and a replay runs the same code as serving.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.int64]
Scores = NDArray[np.float64]

HALF_LIFE_PASSES: Final = 128  # of a use in the policies that count uses


class EvictionPolicy(ABC):
    """Scores experts from their past. `now` is the number of the pass: uses in one pass are of the same age."""

    def on_load(self, expert: int) -> None:  # noqa: B027
        """Receive an expert that got a slot."""

    def on_use(self, experts: Experts, now: int) -> None:  # noqa: B027
        """Receive the experts that a pass needs, distinct and in this order, whether or not they are resident."""

    @abstractmethod
    def scores(self, now: int) -> Scores:
        """Return what each expert is worth, [num_experts of all layers]; only their order matters."""

    def scores_behind(self, now: int) -> tuple[Scores, Scores]:
        """Return the scores of experts after the pass has computed their layer: of used experts, and of unused ones.

        Before their layer, `scores` applies. Infinite: never evict in the same pass.
        """
        unused = self.scores(now)
        return np.full_like(unused, np.inf), unused


def lowest(scores: Scores, candidates: NDArray[np.bool_]) -> int:
    """Return the first candidate with the lowest score. There must be a candidate."""
    return int(np.argmin(np.where(candidates, scores, np.inf)))


class FIFO(EvictionPolicy):
    """First in, first out, as in SiDA (section 3.4)."""

    def __init__(self, num_experts: int) -> None:
        self._loaded = np.zeros(num_experts)
        self._num_loads = 0

    def on_load(self, expert: int) -> None:
        """Store the order."""
        self._num_loads += 1
        self._loaded[expert] = self._num_loads

    def scores(self, now: int) -> Scores:
        """Return the order of loading."""
        return self._loaded


class LRU(EvictionPolicy):
    """Least recently used: evicts unused prefetches early."""

    def __init__(self, num_experts: int) -> None:
        self._used = np.zeros(num_experts)
        self._num_uses = 0

    def on_use(self, experts: Experts, now: int) -> None:
        """Store the order."""
        first, self._num_uses = self._num_uses + 1, self._num_uses + len(experts)
        self._used[experts] = np.arange(first, self._num_uses + 1)

    def scores(self, now: int) -> Scores:
        """Return the order of the last uses."""
        return self._used


class _DecayedCounts:
    """Uses of each expert, a use of `half_life` passes ago counting half.

    All counts decay alike, so new uses grow instead: a count is stored as its logarithm at pass 0. `logaddexp2`
    replaces the sum, and nothing overflows.
    """

    def __init__(self, num_experts: int, half_life: float) -> None:
        self._half_life = half_life
        self.logs = np.full(num_experts, -np.inf)

    def add(self, experts: Experts, now: int) -> None:
        self.logs[experts] = np.logaddexp2(self.logs[experts], now / self._half_life)

    def at(self, now: int) -> Scores:
        """Return the counts as they are at a pass."""
        return np.exp2(self.logs - now / self._half_life)


class LFU(EvictionPolicy):
    """Least frequently used, with decayed counts; an evicted expert keeps its count."""

    def __init__(self, num_experts: int, half_life: float = HALF_LIFE_PASSES) -> None:
        self._counts = _DecayedCounts(num_experts, half_life)

    def on_use(self, experts: Experts, now: int) -> None:
        """Count them."""
        self._counts.add(experts, now)

    def scores(self, now: int) -> Scores:
        """Return the counts' logarithms."""
        return self._counts.logs

    def counts(self, now: int) -> Scores:
        """Return the decayed number of uses of each expert."""
        return self._counts.at(now)


class LFRU(EvictionPolicy):
    """Least frequent and recent use: the decayed count over the passes since the last use."""

    def __init__(self, num_experts: int, half_life: float = HALF_LIFE_PASSES) -> None:
        self._counts = _DecayedCounts(num_experts, half_life)
        self._last = np.zeros(num_experts)

    def on_use(self, experts: Experts, now: int) -> None:
        """Count them and store when."""
        self._counts.add(experts, now)
        self._last[experts] = now

    def scores(self, now: int) -> Scores:
        """Return uses per pass of age."""
        return self._counts.at(now) / (now - self._last + 1)


class Belady(EvictionPolicy):
    """The optimum, for replay: evicts the expert whose next use is last (Belady 1966)."""

    def __init__(self, num_experts: int, uses: Sequence[int]) -> None:
        """Take all future uses, in order."""
        self._scores = np.full(num_experts, -np.inf)  # minus the position of each expert's next use
        self._following = np.full(len(uses), np.inf)  # position of the same expert's use after the one at each position
        last: dict[int, int] = {}
        for position, expert in enumerate(uses):
            if expert in last:
                self._following[last[expert]] = position
            else:
                self._scores[expert] = -position
            last[expert] = position

    def on_use(self, experts: Experts, now: int) -> None:
        """Advance these experts to their uses after this one."""
        self._scores[experts] = -self._following[-self._scores[experts].astype(np.int64)]

    def scores(self, now: int) -> Scores:
        """Return the next uses, the latest lowest."""
        return self._scores
