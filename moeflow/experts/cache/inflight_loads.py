"""Loads that are under way: started, joined, cancelled, and what becomes of them.

Knows neither who wants an expert nor who has to leave for it. All of this is called with the lock of `changed` held;
only when a load ends, whoever brought it takes the lock here.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from moeflow.core.errors import StorageError
from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.load_job import LoadJob, StartLoads
from moeflow.experts.cache.occupancy import Occupancy
from moeflow.experts.cache.prefetches import Prefetches


class InflightLoads:
    """One job for each expert on its way, by its number over all layers."""

    def __init__(
        self,
        occupancy: Occupancy,
        prefetches: Prefetches,
        start_loads: StartLoads,
        changed: threading.Condition,
        *,
        slab_bytes: int,
        stats: CacheStats,
    ) -> None:
        """Begin with none. `changed` is told of every load that ends or is taken back."""
        self.jobs: dict[int, LoadJob] = {}
        self._occupancy = occupancy
        self._prefetches = prefetches
        self._start_loads = start_loads
        self._changed = changed
        self._slab_bytes = slab_bytes
        self._stats = stats

    @property
    def num_prefetches(self) -> int:
        """How many of them nobody waited for when they started."""
        return sum(job.is_prefetch for job in self.jobs.values())

    def place(self, number: int, slot: int, *, is_prefetch: bool) -> LoadJob:
        """Make a job for an expert and a slot that was taken for it; `start` it, or `abandon` it."""
        job = LoadJob(number, slot, is_prefetch=is_prefetch)
        self.jobs[number] = job
        self._occupancy.place(number, slot)
        self._prefetches.awaited[number] = is_prefetch
        return job

    def start(self, jobs: Sequence[LoadJob]) -> None:
        """Start jobs that were placed."""
        if not jobs:
            return
        try:
            handles = self._start_loads(jobs, self._on_done)
        except BaseException:
            self.abandon(jobs)
            raise
        for job, handle in zip(jobs, handles, strict=True):
            job.handle = handle

    def abandon(self, jobs: Sequence[LoadJob]) -> None:
        """Take back loads that were never started; another pass may wait for them already."""
        for job in jobs:
            job.error = StorageError("a load was given up together with the pass that wanted it")
            job.is_done = True
            self._forget(job)

    def cancel(self, job: LoadJob) -> bool:
        """Take a load back, if it has not begun, and free its slot."""
        if job.handle is None or not job.handle.cancel():
            return False
        self._stats.cancelled_loads += 1
        self._forget(job)
        return True

    def cancel_unleased(self) -> bool:
        """Cancel the loads that no lease waits for and that have not begun; return whether there were any."""
        idle = [job for number, job in self.jobs.items() if not self._occupancy.num_leases[number]]
        return any([self.cancel(job) for job in idle])

    def cancel_wrong(self, first: int, end: int, needed: Collection[int]) -> None:
        """Cancel prefetches of experts of these numbers that have proved wrong: not needed, and joined by nobody."""
        if not self.jobs:
            return
        for job in [job for number, job in self.jobs.items() if first <= number < end and number not in needed]:
            if job.is_prefetch and not job.is_joined:
                self.cancel(job)

    def _forget(self, job: LoadJob) -> None:
        del self.jobs[job.expert]
        self._prefetches.awaited[job.expert] = False
        self._occupancy.give_back(self._occupancy.vacate(job.expert))
        self._changed.notify_all()

    def _on_done(self, job: LoadJob, error: Exception | None) -> None:
        """Hear that a load has ended; called without the lock, from any thread."""
        with self._changed:
            job.error, job.is_done = error, True  # in this order: leases look without the lock
            if error is not None:
                self._stats.failed_loads += 1
                self._forget(job)
                return
            del self.jobs[job.expert]
            self._occupancy.arrive(job.expert)
            if not job.is_prefetch:
                self._stats.demand_bytes += self._slab_bytes
            else:
                self._prefetches.on_arrival(job.expert)
                if job.is_joined:
                    self._prefetches.on_use(job.expert)
            self._changed.notify_all()
