"""A disk on a virtual clock: one read at a time, demand before prefetches; a running read is not interrupted.

The given bandwidth is that of all concurrent reads, hence one read at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeflow.experts.cache.load_job import LoadJob, OnDone
from moeflow.pipeline.priority import DEMAND, PREFETCH
from moeflow.pipeline.runtime.future import Future
from moeflow.pipeline.runtime.urgent_first import UrgentFirst


class VirtualRead(Future[None]):
    """A requested read; an expert cache's `LoadHandle`."""

    def __init__(self, job: LoadJob, on_done: OnDone) -> None:
        super().__init__()
        self.job = job
        self.report = on_done


class VirtualDisk:
    """Serves reads of equal length, and keeps the clock."""

    def __init__(self, read_s: float) -> None:
        self.now_s = 0.0
        self.waited_s = 0.0  # for reads, in `wait`
        self.num_asked = 0  # reads
        self._read_s = read_s
        self._queue = UrgentFirst[VirtualRead]()
        self._current: VirtualRead | None = None
        self._end_s = 0.0  # of the current read

    def start_loads(self, jobs: Sequence[LoadJob], on_done: OnDone) -> list[VirtualRead]:
        """Queue reads."""
        reads = [VirtualRead(job, on_done) for job in jobs]
        self.num_asked += len(reads)
        for read in reads:
            self._queue.put(read, PREFETCH if read.job.is_prefetch else DEMAND)
        if self._current is None:
            self._begin_next(self.now_s)
        return reads

    def pass_time(self, seconds: float) -> None:
        """Advance the clock; reads end and begin meanwhile."""
        until_s = self.now_s + seconds
        while self._current is not None and self._end_s <= until_s:
            self._end_current()
        self.now_s = until_s

    def wait(self) -> None:
        """Advance the clock until the next read ends. There must be one."""
        assert self._current is not None
        self.waited_s += self._end_s - self.now_s
        self.now_s = self._end_s
        self._end_current()

    def _end_current(self) -> None:
        ended, self._current = self._current, None
        assert ended is not None
        self._begin_next(self._end_s)
        ended.report(ended.job, None)

    def _begin_next(self, at_s: float) -> None:
        while (read := self._queue.take()) is not None:
            if read.begin():  # it was not cancelled
                self._current, self._end_s = read, at_s + self._read_s
                return
