"""Loads experts into slots: finds a slot, evicts for it, starts the load and waits.

Loads run in other threads (`StartLoads`). `expert_states.py` has the state of each expert, `eviction_selector.py`
chooses victims; the lock here protects both. Prefetches take a slot only from experts without a lease, and never from
another prefetch that a pass may still need.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from moeflow.core.errors import CapacityError
from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.eviction_selector import EvictionSelector
from moeflow.experts.cache.expert_states import ABSENT, ExpertState, ExpertStates
from moeflow.experts.cache.journal import Fetcher
from moeflow.experts.cache.load_job import LoadJob, StartLoads

if TYPE_CHECKING:
    from moeflow.experts.cache.expert_needs import ExpertNeeds


class ExpertLoads:
    """The loads of all layers' experts. Callers hold the lock, except for `up_to_date` and `on_done`."""

    def __init__(
        self,
        states: ExpertStates,
        victims: EvictionSelector,
        stats: CacheStats,
        changed: threading.Condition,
        *,
        start_loads: StartLoads,
        wait: Callable[[threading.Condition], object],
    ) -> None:
        """`changed` has the reentrant lock; `wait` returns when a load may have ended."""
        self.states = states
        self.victims = victims
        self.stats = stats
        self.changed = changed
        self.fetcher: Fetcher | None = None  # borrows slots, and reports ended loads
        self.is_read = False  # whether kernels read the table of slots
        self.is_lent = False  # whether slots are lent to kernels: then only these assign slots
        self.is_elsewhere = np.zeros(len(states.all), bool)  # computed by another machine or processor: not prefetched
        self.needs: ExpertNeeds | None = None  # counts what passes need; None: nobody wants to know
        self._start_loads = start_loads
        self._wait = wait

    @contextmanager
    def up_to_date(self) -> Iterator[None]:
        """Hold the lock, after ended loads were taken into account, except those of kernels under way."""
        with self.changed:
            if not self.is_read:
                self._take_ended()
            yield

    def load(self, absent: Sequence[ExpertState]) -> dict[int, LoadJob]:
        """Start loads and return them. Another thread may start the same ones while this one waits for a slot."""
        jobs = {}
        placed: list[LoadJob] = []
        with self._abandoning(placed):
            for state in absent:
                slot = self._find_slot()
                if state.slot == ABSENT:
                    jobs[state.number] = self.begin(state.number, slot, is_prefetch=False)
                    placed.append(jobs[state.number])
                    continue
                self.states.give_back(slot)
                if state.load is not None:
                    jobs[state.number] = state.load
                    state.load.is_joined = state.load.is_prefetch
        self._start(placed)
        return jobs

    def load_ahead(self, numbers: Iterator[int], room: int) -> int:
        """Start at most `room` loads of absent experts, in order, while there is a spare slot; return the number."""
        jobs: list[LoadJob] = []
        with self._abandoning(jobs):
            for number in numbers:
                slot = self._spare_slot() if len(jobs) < room else None
                if slot is None:
                    break
                jobs.append(self.begin(number, slot, is_prefetch=True))
        self._start(jobs)
        return len(jobs)

    def begin(self, number: int, slot: int, *, is_prefetch: bool) -> LoadJob:
        """Return the job that loads an absent expert into a slot that was taken for it; the caller starts it."""
        self.victims.on_load(number)
        return self.states.begin_load(number, slot, is_prefetch=is_prefetch)

    def on_done(self, job: LoadJob, error: Exception | None) -> None:
        """Receive the end of a load, from any thread."""
        with self.changed:
            self.states.end_load(job, error)
            self.changed.notify_all()

    def release(self, held: Sequence[ExpertState]) -> None:
        """End a lease; loads that it alone waited for are cancelled if they have not begun."""
        for state in held:
            if self.states.unlease(state) and state.load is not None:
                self.states.cancel(state.load)
        self.changed.notify_all()

    def shrink(self, num_slots: int, move: Callable[[int, int], None]) -> None:
        """Empty the slots from `num_slots` on, except for leased ones."""
        states = self.states
        states.cancel_unleased()
        while self.is_read or any(
            job.slot >= num_slots and not states.all[number].num_leases for number, job in states.loads.items()
        ):
            self.wait_for_change()
        num_slots = states.min_size(num_slots)
        while states.num_taken > num_slots:
            slot = self._evict(for_demand=True)
            assert slot is not None, "all but leased experts and loads that no lease waits for can be evicted"
            states.give_back(slot)
        states.shrink(num_slots, move)

    def wait_for_change(self) -> None:
        """Let a pass wait until a load may have ended."""
        start = time.perf_counter()
        self.wait_for_load()
        self.stats.stall_s += time.perf_counter() - start

    def wait_for_load(self) -> None:
        """Wait until a load may have ended, without counting the time as a stall."""
        if self.is_read:  # the kernels under way take ended loads
            self.changed.wait()
            return
        self._wait(self.changed)
        self._take_ended()

    @contextmanager
    def _abandoning(self, jobs: Sequence[LoadJob]) -> Iterator[None]:
        """End these loads if they cannot be started: otherwise a pass could wait for one without end."""
        try:
            yield
        except BaseException:
            self.states.abandon(jobs)
            raise

    def _start(self, jobs: Sequence[LoadJob]) -> None:
        """Start loads that were begun."""
        if not jobs:
            return
        with self._abandoning(jobs):
            handles = self._start_loads(jobs, self.on_done)
        for job, handle in zip(jobs, handles, strict=True):
            job.handle = handle

    def _find_slot(self) -> int:
        """Return a slot for a needed expert. Raises: CapacityError if leases hold all slots."""
        while self.is_lent or (slot := self.states.take_free()) is None:
            if self.is_read:
                self.wait_for_change()
                continue
            slot = self._evict(for_demand=True)
            if slot is not None:
                return slot
            if self.states.cancel_unleased():
                continue
            if all(self.states.all[number].num_leases for number in self.states.loads):
                raise CapacityError(
                    f"all {self.states.num_slots} slots for experts are in use, and one more is needed. Raise the "
                    "memory limit (--memory), or choose a smaller weight format"
                )
            self.wait_for_change()
        return slot

    def _spare_slot(self) -> int | None:
        """Return a slot for a prefetch; None if all slots are worth more as they are."""
        if self.is_lent:
            return None
        slot = self.states.take_free()
        return self._evict(for_demand=False) if slot is None else slot

    def _evict(self, *, for_demand: bool) -> int | None:
        """Evict an expert and return its slot; None if none may be evicted, or kernels run."""
        if self.is_read:
            return None
        number = self.victims.choose(self.states, for_demand=for_demand)
        return None if number is None else self.states.evict(number)

    def _take_ended(self) -> None:
        if self.fetcher is not None:
            self.fetcher.poll()
