"""KV blocks that a thread fills from disk, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moeflow.pipeline.runtime.future import Future

LATE_S: Final = 30.0  # without a block: the disk hangs, and requests should not wait for it


class BlocksRead:
    """See `PrefixRead` of scheduler/prefix_source.py."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._progress_s = clock()
        self._num_copied = 0
        self.has_state = False  # see `PrefixRead`
        self.job: Future[int] | None = None  # that reads

    def copied(self) -> None:
        """One more block is filled; for the thread that reads."""
        self._num_copied += 1
        self.note_progress()

    def note_progress(self) -> None:
        """Something was read; for the same thread."""
        self._progress_s = self._clock()

    @property
    def is_over(self) -> bool:
        """Whether nothing is written any more."""
        return self.job is not None and self.job.is_done

    @property
    def is_late(self) -> bool:
        """Whether the disk seems to hang."""
        return not self.is_over and self._clock() - self._progress_s > LATE_S

    def cancel(self) -> None:
        """See `PrefixRead`."""
        if self.job is not None:
            self.job.cancel()

    @property
    def num_filled(self) -> int:
        """How many blocks, the first ones, have their contents."""
        return self._num_copied
