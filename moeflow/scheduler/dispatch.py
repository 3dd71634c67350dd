"""Chooses the engine for the next request: the one with most of its prompt in the prefix cache, unless it is much
busier. Else the one with the fewest requests, round-robin between equals. (The rule is that of SGLang's
router: cache first, as long as loads are about the same.)

Requests wait in one queue, first come, first served, until an engine can begin with them in the next passes. Until then
they may go to any engine that is free sooner. Knows neither processes nor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LEAST_SHARE: Final = 0.5  # of a prompt that must be cached to outweigh a shorter queue
MORE_RIVALS: Final = 4  # more requests that an engine with the cached prefix may have ...
TIMES_RIVALS: Final = 1.5  # ... beyond so many times as many as the least busy has
BATCH_BACKLOG: Final = 4  # batch requests in an engine, in multiples of its concurrent ones: enough to choose from


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine has to do."""

    num_interactive: int  # requests that it has been given, those of batch jobs left out
    num_batch: int = 0  # those of batch jobs
    num_waiting: int = 0  # interactive ones that it lets wait, for want of blocks say
    prefill_tokens: int  # that interactive ones need before they bring any
    num_places: int  # for concurrent requests
    tokens_of_pass: int  # that it computes in a pass at most
    is_slow: bool = False  # compared with the others
    cached_share: float = 0.0  # of the request that is to be given away, as far as is known

    def num_rivals(self, *, is_batch: bool) -> int:
        """Return how many requests stand in the way of another one: those of batch jobs give way to the others."""
        return self.num_interactive + (self.num_batch if is_batch else 0)

    def has_room(self, *, is_batch: bool) -> bool:
        """Return whether another request would be computed in the next passes.

        Requests that the engine lets wait come first. It gets no more than about a pass takes, so that other engines
        can begin the rest sooner. Of batch jobs some more may wait there: it chooses
        among them.
        """
        if is_batch:
            return self.num_batch < BATCH_BACKLOG * self.num_places
        can_begin = not self.num_waiting and self.prefill_tokens < self.tokens_of_pass
        return can_begin and self.num_interactive < self.num_places


class Dispatch:
    """Chooses engines, one after the other."""

    def __init__(self) -> None:
        self._turn = 0  # of the engine that is asked first

    def choose(self, loads: Sequence[EngineLoad | None], *, is_batch: bool = False) -> int | None:
        """Return the number of the engine that gets the next request; None: the request has to wait.

        `loads` are those of all engines, None of one that does not run.
        """
        turn = self._turn % len(loads)
        ready = [(at, load) for at, load in enumerate(loads) if load is not None]
        ready = [it for it in ready if it[0] >= turn] + [it for it in ready if it[0] < turn]
        quick = [it for it in ready if not it[1].is_slow] or ready
        free = [it for it in quick if it[1].has_room(is_batch=is_batch)]
        if not free:
            return None
        rivals = [load.num_rivals(is_batch=is_batch) for _, load in free]
        chosen, _ = free[best_of(rivals, [load.cached_share for _, load in free])]
        self._turn = chosen + 1
        return chosen


def best_of(rivals: Sequence[int], shares: Sequence[float]) -> int:
    """Return which of several engines gets a request; the first, where nothing tells them apart.

    `rivals` are the requests that it would be computed with in each, `shares` what of its prompt is cached there.
    """
    limit = TIMES_RIVALS * min(rivals) + MORE_RIVALS
    worth = [share if share >= LEAST_SHARE and num <= limit else 0.0 for num, share in zip(rivals, shares, strict=True)]
    return min(range(len(rivals)), key=lambda index: (-worth[index], rivals[index]))
