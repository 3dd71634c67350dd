"""What kernels did with slots that they were lent for a pass, for the cache to catch up with.

Between two layers there is no time to ask: so the cache says before a pass which slots may be taken, and what each
expert is worth, and reads afterwards what became of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from moeflow.experts.cache.load_job import LoadHandle, LoadJob, OnDone
from moeflow.experts.cache.worth import Worth


class Event(IntEnum):
    """What happened to an expert; as in csrc/io/expert_fetcher.h."""

    EVICTED = 0
    RETIRED = 1  # evicted after the pass had used it
    LOADING = 2  # because the pass needs it
    PREFETCHING = 3  # because it may
    JOINED = 4  # it was on its way, and the pass needs it
    CANCELLED = 5
    ARRIVED = 6
    FAILED = 7


class Journal(NamedTuple):
    """What happened while slots were lent."""

    entries: Sequence[tuple[int, int, int]]  # event, number of the expert over all layers, slot; in order
    num_late: int  # experts that layers needed which were finished, and that were on their way
    num_misses: int  # or absent
    stall_s: float


class Fetcher(Protocol):
    """Who has experts come during a pass, and knows the loads that came of it."""

    def begin(self, free_slots: Sequence[int], worth: Worth | None, *, max_prefetches: int, max_needed: int) -> None:
        """Lend slots; see `SlotFetcher.begin`."""

    def end(self) -> Journal:
        """Take them back."""

    def poll(self) -> None:
        """Report loads that have ended, and that nobody waited for."""

    def adopt(self, job: LoadJob, on_done: OnDone) -> LoadHandle:
        """Take over a load that is under way, as if it had been started by `StartLoads`."""

    def drop(self, job: LoadJob) -> None:
        """Forget a load that was cancelled."""

    def outcome(self, job: LoadJob, *, is_right: bool) -> Exception | None:
        """Return what is wrong with a load that has ended: one that failed is tried again."""
