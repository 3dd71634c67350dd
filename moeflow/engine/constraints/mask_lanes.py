"""Computes masks beside an engine's passes: quick ones in one lane, slow ones in another.

A request with a slow mask is in the slow lane from then on, until its masks are quick again. Where the quick lane meets
a slow mask, another thread takes over the rest of its queue. So a slow mask holds up no other request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Thread
from typing import Final

from moeflow.core.batch import BatchEntry
from moeflow.core.request import RequestStatus
from moeflow.core.token_mask import TokenConstraint, TokenMask
from moeflow.engine.constraints.priority import SLOW_MASKS, lower

logger = logging.getLogger(__name__)

NUM_SLOW: Final = 2  # masks at once
HELD_UP_S: Final = 0.02  # the quick lane, by one mask, before another thread takes over


class MaskJob:
    """The masks of one request in one pass."""

    def __init__(self, entry: BatchEntry, constraint: TokenConstraint) -> None:
        self._request = entry.request
        self.token_ids = list(entry.request.output_token_ids)
        self.is_slow = constraint.is_slow
        self.masks: Future[Sequence[TokenMask | None]] = Future()
        self._constraint, self._paths = constraint, entry.tree.paths

    def run(self) -> None:
        """Compute them, unless the request has ended. A failure is one of this request alone."""
        if self._request.status is RequestStatus.FINISHED:
            return
        try:
            found = self._constraint.masks(self.token_ids, self._paths)
        except BaseException as error:  # a panic of llguidance's is no Exception, and must not end the thread
            logger.exception("the mask of a form failed")
            found = [TokenMask(error=f"the form of the answer cannot be followed: {error}")] * len(self._paths)
        self.masks.set_result(found)


class MaskLanes:
    """Of one engine, which alone calls it. Threads begin with the first job."""

    def __init__(self) -> None:
        self._quick: SimpleQueue[MaskJob | None] = SimpleQueue()
        self._worker: _Worker | None = None
        self._slow = ThreadPoolExecutor(
            NUM_SLOW, thread_name_prefix="slow-masks", initializer=lower, initargs=(SLOW_MASKS,)
        )

    def begin(self, entry: BatchEntry, constraint: TokenConstraint) -> MaskJob:
        """Begin with the masks of an entry. No other job of its request may be under way."""
        job = MaskJob(entry, constraint)
        if job.is_slow:
            self._slow.submit(job.run)
            return job
        if self._worker is None:
            self._worker = _Worker(self._quick)
        self._quick.put(job)
        return job

    def relieve(self) -> None:
        """Have another thread go through the quick lane if its thread is held up."""
        if self._worker is not None and self._worker.is_held_up:
            self._worker.retire()
            self._worker = _Worker(self._quick)

    def close(self) -> None:
        """End the threads, once their masks are computed."""
        self._slow.shutdown(cancel_futures=True)
        if self._worker is not None:
            self._quick.put(None)
            self._worker.join()


class _Worker(Thread):
    """Goes through the quick lane until it is retired."""

    def __init__(self, jobs: SimpleQueue[MaskJob | None]) -> None:
        super().__init__(name="masks", daemon=True)
        self._jobs = jobs
        self._is_retired = False
        self._begun_s: float | None = None  # the job under way
        self.start()

    @property
    def is_held_up(self) -> bool:
        """Whether the job under way takes long."""
        begun_s = self._begun_s
        return begun_s is not None and time.monotonic() - begun_s > HELD_UP_S

    def retire(self) -> None:
        """Have the thread end with the job under way, which takes what others leave of the processor."""
        self._is_retired = True
        assert self.native_id is not None, "a thread that works has begun"
        lower(SLOW_MASKS, self.native_id)

    def run(self) -> None:
        """Work."""
        while not self._is_retired and (job := self._jobs.get()) is not None:
            self._begun_s = time.monotonic()
            job.run()
            self._begun_s = None
