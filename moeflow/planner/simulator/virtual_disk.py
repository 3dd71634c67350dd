"""A disk on a virtual clock: one read at a time, demand before prefetches, a read that has begun goes to its end.

One at a time, since many at once share the bandwidth that is given here as that of all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from moeflow.experts.cache.load_job import LoadJob, OnDone


class VirtualRead:
    """A read that was asked for; an expert cache's `LoadHandle`."""

    def __init__(self, job: LoadJob, on_done: OnDone) -> None:
        self.job = job
        self.on_done = on_done
        self.has_begun = False
        self.is_cancelled = False

    def cancel(self) -> bool:
        """Take it back if it has not begun."""
        if self.has_begun:
            return False
        self.is_cancelled = True
        return True


class VirtualDisk:
    """Serves reads of equal length, and keeps the clock."""

    def __init__(self, read_s: float) -> None:
        self.now_s = 0.0
        self.waited_s = 0.0  # for reads, by whoever called `wait`
        self.num_asked = 0  # reads
        self._read_s = read_s
        self._demand: deque[VirtualRead] = deque()
        self._prefetches: deque[VirtualRead] = deque()
        self._current: VirtualRead | None = None
        self._end_s = 0.0  # of the current read

    def start_loads(self, jobs: Sequence[LoadJob], on_done: OnDone) -> list[VirtualRead]:
        """Queue reads."""
        reads = [VirtualRead(job, on_done) for job in jobs]
        self.num_asked += len(reads)
        for read in reads:
            (self._prefetches if read.job.is_prefetch else self._demand).append(read)
        if self._current is None:
            self._begin_next(self.now_s)
        return reads

    def pass_time(self, seconds: float) -> None:
        """Advance the clock by a time in which reads end and begin."""
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
        ended.on_done(ended.job, None)

    def _begin_next(self, at_s: float) -> None:
        for queue in (self._demand, self._prefetches):
            while queue:
                read = queue.popleft()
                if not read.is_cancelled:
                    read.has_begun = True
                    self._current = read
                    self._end_s = at_s + self._read_s
                    return
