"""The fetcher of a cache: experts come by the extension while a pass runs, and by the disk reader otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.journal import Journal
from moeflow.experts.cache.load_job import LoadHandle, LoadJob, OnDone
from moeflow.experts.cache.worth import Worth
from moeflow.experts.disk_reader import DiskReader
from moeflow.kernels.cpu.slab_reads import SlotFetcher


class DiskFetcher:
    """See `cache.journal.Fetcher`."""

    def __init__(self, disk: DiskReader, cache: ExpertCache) -> None:
        """Take a cache whose loads the disk reader starts."""
        self._disk = disk
        self._slots = SlotFetcher(disk.reads, cache.kernel_reads.slot_table)

    @property
    def handle(self) -> Any:
        """What a pass needs of it."""
        return self._slots.handle

    def begin(self, free_slots: Sequence[int], worth: Worth | None, *, max_prefetches: int, max_needed: int) -> None:
        """Lend slots."""
        arrays = None if worth is None else (worth.before, worth.used, worth.unused, worth.may_leave)
        self._slots.begin(free_slots, arrays, max_prefetches=max_prefetches, max_needed=max_needed)

    def end(self) -> Journal:
        """Take them back."""
        return Journal(*self._slots.end())

    def poll(self) -> None:
        """Report loads that have ended."""
        self._disk.poll()

    def adopt(self, job: LoadJob, on_done: OnDone) -> LoadHandle:
        """Take over a load that is under way."""
        return self._disk.adopt(job, on_done)

    def drop(self, job: LoadJob) -> None:
        """Forget a load that was cancelled."""
        self._disk.drop(job)

    def outcome(self, job: LoadJob, *, is_right: bool) -> Exception | None:
        """Return what is wrong with a load that has ended."""
        return self._disk.outcome(job, is_right=is_right)
