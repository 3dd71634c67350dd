"""Decides which memory experts deserve: the hottest get slots here, the next ones a lender's memory, the others none.

The measure is the decayed number of uses. An expert displaces another only with more than twice its uses, so that
chance moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeflow.experts.cache.eviction import Scores

_CLEARLY: Final = 2.0
_AT_LEAST: Final = 1.0  # more uses, so that a first use displaces nothing


@dataclass(frozen=True, slots=True)
class LendingMove:
    """An expert for a lender, and the expert that it displaces."""

    place: int
    drop: int | None


def displaces(count: float, other: float) -> bool:
    """Return whether an expert with `count` uses displaces one with `other`."""
    return count > _CLEARLY * other + _AT_LEAST


def hot_enough(counts: Scores, is_resident: NDArray[np.bool_], *, has_free_slot: bool) -> float:
    """Return the number of uses from which an expert deserves a slot here, even if lenders could compute it."""
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
) -> LendingMove | None:
    """Return the next expert for a lender that has `held`; None: none deserves it.

    Equally used experts follow layer by layer. Resident experts come last.

    Shapes: all [experts of all layers]. Any lender has experts `is_elsewhere`; `num_experts` is the number in a layer.
    """
    numbers = np.arange(len(counts))
    turn = numbers % num_experts * (len(counts) // num_experts) + numbers // num_experts
    worth = np.where(is_resident, -1.0, counts)
    candidates = ~(is_elsewhere | held)
    if not candidates.any() or not num_slots:
        return None
    best = int(np.lexsort((turn, -np.where(candidates, worth, -np.inf)))[0])
    if held.sum() < num_slots:
        return LendingMove(best, None)
    worst = int(np.argmin(np.where(held, worth, np.inf)))
    return LendingMove(best, worst) if displaces(worth[best], worth[worst]) else None
