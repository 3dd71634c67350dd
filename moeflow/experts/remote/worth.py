"""Which experts deserve which memory: the hottest the slots here, the next ones a lender's, the others the disk alone.

All by how often passes used them lately. An expert changes its place only if it is used more than twice as often as
the one that makes room, so that chance moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeflow.experts.cache.eviction import Scores

_CLEARLY: Final = 2.0
_AT_LEAST: Final = 1.0  # use more, so that a first use displaces nothing


@dataclass(frozen=True, slots=True)
class Move:
    """An expert for a lender, and one that makes room for it."""

    place: int
    drop: int | None


def displaces(count: float, other: float) -> bool:
    """Return whether an expert of so many uses takes the place of another's."""
    return count > _CLEARLY * other + _AT_LEAST


def hot_enough(counts: Scores, is_resident: NDArray[np.bool_], *, has_free_slot: bool) -> float:
    """Return how many uses an expert needs so that it is read into a slot, though others could compute with it."""
    if has_free_slot or not is_resident.any():
        return -1.0
    return _CLEARLY * float(counts[is_resident].min()) + _AT_LEAST


def next_move(
    counts: Scores,
    is_resident: NDArray[np.bool_],
    is_elsewhere: NDArray[np.bool_],
    held: NDArray[np.bool_],
    *,
    num_slots: int,
    num_experts: int,
) -> Move | None:
    """Return what a lender that has `held` should get next; None: nothing better.

    Of experts that were used as often, those of all layers come in turn. What is in a slot here comes last.

    Shapes: all [experts of all layers]; `is_elsewhere` is what any lender has. `num_experts` are those of a layer.
    """
    numbers = np.arange(len(counts))
    turn = numbers % num_experts * (len(counts) // num_experts) + numbers // num_experts
    worth = np.where(is_resident, -1.0, counts)
    candidates = ~(is_elsewhere | held)
    if not candidates.any() or not num_slots:
        return None
    best = int(np.lexsort((turn, -np.where(candidates, worth, -np.inf)))[0])
    if held.sum() < num_slots:
        return Move(best, None)
    worst = int(np.argmin(np.where(held, worth, np.inf)))
    return Move(best, worst) if displaces(worth[best], worth[worst]) else None
