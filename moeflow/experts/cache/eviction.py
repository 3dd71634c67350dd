"""Who goes when a slot is needed: each policy keeps a score for every expert, and the lowest score is evicted.

Experts are numbered from 0 over all layers. A policy hears of every use and every load, also of experts that are not
resident, and knows nothing of slots or of who may be evicted now. Scores are arrays, so that choosing among thousands
costs microseconds, and replaying a trace needs no other code than serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.int64]
Scores = NDArray[np.float64]

HALF_LIFE_PASSES: Final = 128  # of a use in the policies that count uses


class EvictionPolicy(Protocol):
    """Decides who is worth least. `now` is the number of the pass: uses in one pass are of the same age."""

    def on_load(self, expert: int) -> None:
        """Hear that an expert got a slot."""
        ...

    def on_use(self, experts: Experts, now: int) -> None:
        """Hear that a pass needs these experts, distinct and in this order, whether or not they are resident."""
        ...

    def scores(self, now: int) -> Scores:
        """Return what each expert is worth, [num_experts of all layers]; only their order matters."""
        ...


def choose_victim(policy: EvictionPolicy, evictable: NDArray[np.bool_], now: int) -> int:
    """Return the evictable expert of the lowest score, of equal ones the first. At least one must be evictable."""
    return int(np.argmin(np.where(evictable, policy.scores(now), np.inf)))


class FIFO:
    """First in, first out, as in SiDA (section 3.4)."""

    def __init__(self, num_experts: int) -> None:
        self._loaded = np.zeros(num_experts)
        self._num_loads = 0

    def on_load(self, expert: int) -> None:
        """Note the order."""
        self._num_loads += 1
        self._loaded[expert] = self._num_loads

    def on_use(self, experts: Experts, now: int) -> None:
        """Uses do not count."""

    def scores(self, now: int) -> Scores:
        """Return the order of loading."""
        return self._loaded


class LRU:
    """Least recently used."""

    def __init__(self, num_experts: int) -> None:
        self._used = np.zeros(num_experts)
        self._num_uses = 0

    def on_load(self, expert: int) -> None:
        """Loads do not count: what was prefetched in vain goes soon."""

    def on_use(self, experts: Experts, now: int) -> None:
        """Note the order."""
        first, self._num_uses = self._num_uses + 1, self._num_uses + len(experts)
        self._used[experts] = np.arange(first, self._num_uses + 1)

    def scores(self, now: int) -> Scores:
        """Return the order of the last uses."""
        return self._used


class _DecayedCounts:
    """Uses of each expert, a use of `half_life` passes ago counting half.

    All counts decay alike, so they are stored as the logarithm of what they would be at pass 0: grown there instead
    of shrunk here. log2 of a sum of powers then takes the place of the sum, and nothing overflows.
    """

    def __init__(self, num_experts: int, half_life: float) -> None:
        self._half_life = half_life
        self.logs = np.full(num_experts, -np.inf)

    def add(self, experts: Experts, now: int) -> None:
        self.logs[experts] = np.logaddexp2(self.logs[experts], now / self._half_life)

    def at(self, now: int) -> Scores:
        """Return the counts as they are at a pass."""
        return np.exp2(self.logs - now / self._half_life)


class LFU:
    """Least frequently used, with old uses counting ever less; an evicted expert keeps its count."""

    def __init__(self, num_experts: int, half_life: float = HALF_LIFE_PASSES) -> None:
        self._counts = _DecayedCounts(num_experts, half_life)

    def on_load(self, expert: int) -> None:
        """Loads do not count."""

    def on_use(self, experts: Experts, now: int) -> None:
        """Count them."""
        self._counts.add(experts, now)

    def scores(self, now: int) -> Scores:
        """Return the counts' logarithms."""
        return self._counts.logs


class LFRU:
    """Least frequent and recent use: the decayed count over the passes since the last use."""

    def __init__(self, num_experts: int, half_life: float = HALF_LIFE_PASSES) -> None:
        self._counts = _DecayedCounts(num_experts, half_life)
        self._last = np.zeros(num_experts)

    def on_load(self, expert: int) -> None:
        """Loads do not count."""

    def on_use(self, experts: Experts, now: int) -> None:
        """Count them and note when."""
        self._counts.add(experts, now)
        self._last[experts] = now

    def scores(self, now: int) -> Scores:
        """Return uses per pass of age."""
        return self._counts.at(now) / (now - self._last + 1)


class Belady:
    """The best there is, for replay: evicts whom the future needs last (Belady 1966)."""

    def __init__(self, num_experts: int, uses: Sequence[int]) -> None:
        """Take all uses to come, in order, as `on_use` will tell them."""
        self._scores = np.full(num_experts, -np.inf)
        self._next = np.full(len(uses), np.inf)  # position of the same expert's next use
        last: dict[int, int] = {}
        for position, expert in enumerate(uses):
            if expert in last:
                self._next[last[expert]] = position
            else:
                self._scores[expert] = -position
            last[expert] = position
        self._position = 0

    def on_load(self, expert: int) -> None:
        """Loads do not change the future."""

    def on_use(self, experts: Experts, now: int) -> None:
        """Advance by so many uses."""
        end = self._position + len(experts)
        self._scores[experts] = -self._next[self._position : end]
        self._position = end

    def scores(self, now: int) -> Scores:
        """Return the next uses, the latest lowest."""
        return self._scores


POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {"fifo": FIFO, "lru": LRU, "lfu": LFU, "lfru": LFRU}
DEFAULT_POLICY: Final = "lfru"
