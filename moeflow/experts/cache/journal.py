"""The journal of kernels that assigned lent slots during a pass; the cache repeats it on its own records.

Python cannot run between two layers. So before a pass, the cache names slots that kernels may take, and the worth of
each expert. After the pass, it reads the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from moeflow.experts.cache.load_job import LoadHandle, LoadJob, OnDone
from moeflow.experts.cache.worth import Worth


class Event(IntEnum):
    """What happened to an expert; as in csrc/io/expert_fetcher.h."""

    EVICTED = 0
    RETIRED = 1  # evicted after the pass had used it
    LOADING = 2  # on demand
    PREFETCHING = 3  # by prediction
    JOINED = 4  # loading already when the pass needed it
    CANCELLED = 5
    ARRIVED = 6
    FAILED = 7


class SlotJournal(NamedTuple):
    """The events while slots were lent, in order."""

    entries: Sequence[tuple[int, int, int]]  # event, number of the expert over all layers, slot
    num_late: int  # needed experts of finished layers that were loading already
    num_misses: int  # ... and that were absent
    stall_s: float

    @property
    def absent(self) -> set[int]:
        """Experts that were not resident when kernels needed them, by their numbers over all layers."""
        return {number for event, number, _ in self.entries if event in (Event.LOADING, Event.JOINED)}


NO_EVENTS: Final = SlotJournal((), 0, 0, 0.0)


class Fetcher(Protocol):
    """Loads experts while kernels run, and knows the loads that kernels started."""

    def begin(self, free_slots: Sequence[int], worth: Worth | None, *, max_prefetches: int, max_needed: int) -> None:
        """Lend slots; see `SlotFetcher.begin`."""

    def end(self) -> SlotJournal:
        """Take the slots back; return the journal."""

    def poll(self) -> None:
        """Report ended loads."""

    def adopt(self, job: LoadJob, on_done: OnDone) -> LoadHandle:
        """Take over a load under way, as if `StartLoads` had started it."""

    def drop(self, job: LoadJob) -> None:
        """Forget a cancelled load."""

    def outcome(self, job: LoadJob, *, is_right: bool) -> Exception | None:
        """Return the error of an ended load, after a retry if it failed."""
