"""Works through the jobs of `/v1/batches`, oldest first, and takes each through its states.

What it needs to go on is on disk at every moment: after a kill the next start finds the unfinished jobs, their
journals say which requests are done, and each step of finishing may happen twice. While no model is served, or
another than a job is for, the job waits; its time runs all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from moeflow.core.errors import EngineError
from moeflow.server.jobs.batch_store import FINAL, BatchStore, Errors, StoredBatch
from moeflow.server.jobs.file_store import FileStore
from moeflow.server.jobs.journal import Journal
from moeflow.server.jobs.lines import LineProblem, scan
from moeflow.server.jobs.runner import run_job
from moeflow.server.service import Service

logger = logging.getLogger(__name__)

MAX_LINES = 50_000  # OpenAI's limit
LOOK_S = 0.2  # how soon a cancellation is noticed
_LATE = "This request could not be executed before the completion window expired."


class BatchWorker:
    """One at a time: the engine computes requests together anyway, and the first job is done first."""

    def __init__(self, service: Service, batches: BatchStore, files: FileStore) -> None:
        self._service = service
        self._batches = batches
        self._files = files
        self._task: asyncio.Task[None] | None = None
        self._current: StoredBatch | None = None  # what is worked on now
        self._news = asyncio.Event()  # a job has come, or was cancelled

    def wake(self) -> None:
        """Look for work, now and from now on. To be called in the event loop of the server."""
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Leave the running job as it is; the next start goes on with it."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def cancel(self, batch: StoredBatch) -> None:
        """Ask for a job's end. Does nothing if it has come to one. Raises: OSError."""
        if batch.status == "validating" and batch is not self._current:  # another runs, and may run for hours
            batch.status, batch.cancelling_at, batch.cancelled_at = "cancelled", self._batches.now, self._batches.now
            self._batches.save(batch)
        elif batch.status not in (*FINAL, "cancelling", "finalizing"):
            batch.status, batch.cancelling_at = "cancelling", self._batches.now
            self._batches.save(batch)
            self.wake()

    async def _work(self) -> None:
        while True:
            self._news.clear()
            batch = self._next()
            if batch is not None:
                self._current = batch
                try:
                    await self._advance(batch)
                finally:
                    self._current = None
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._until_next_expiry()):
                    await self._news.wait()

    def _next(self) -> StoredBatch | None:
        """Return the first job for which something can be done."""
        for batch in self._batches.unfinished():
            if batch.status == "cancelling" or self._left_s(batch) <= 0 or self._is_served(batch):
                return batch
        return None

    def _is_served(self, batch: StoredBatch) -> bool:
        loaded = self._service.loaded
        return self._service.status == "ready" and loaded is not None and loaded.client.model.name == batch.model

    def _left_s(self, batch: StoredBatch) -> float:
        return batch.expires_at - self._batches.now

    def _until_next_expiry(self) -> float | None:
        waiting = [self._left_s(batch) for batch in self._batches.unfinished()]
        return max(min(waiting), 0.1) if waiting else None

    async def _advance(self, batch: StoredBatch) -> None:
        """Take a job to its end, unless the engine goes first."""
        try:
            await self._to_its_end(batch)
        except EngineError as error:  # not the job's fault: a later start goes on
            logger.warning("batch %s waits: %s", batch.id, error)
            await asyncio.sleep(1.0)
        except Exception as error:
            logger.exception("batch %s failed", batch.id)
            self._fail(batch, [LineProblem(None, "internal_error", f"the server failed on this batch: {error}")])

    async def _to_its_end(self, batch: StoredBatch) -> None:
        source = self._files.path(batch.input_file_id)
        max_line_bytes = self._service.config.max_body_bytes
        found = await asyncio.to_thread(
            scan, source, max_line_bytes=max_line_bytes, max_lines=MAX_LINES, endpoint=batch.endpoint
        )
        if found.problems:
            self._fail(batch, found.problems)
            return
        batch.request_counts.total = len(found.result_ids)
        if batch.status == "validating":
            batch.status, batch.in_progress_at = "in_progress", self._batches.now
        self._batches.save(batch)
        output, errors = self._batches.journal_paths(batch)
        if batch.status != "finalizing":
            with Journal(output, errors, found.result_ids, batch.model) as journal:
                await self._answer(batch, journal)
                batch.count(journal.totals)
        self._finish(batch)

    async def _answer(self, batch: StoredBatch, journal: Journal) -> None:
        """Run a job until it is done, cancelled or out of time. Errors of what was not done are written then."""

        running = asyncio.create_task(
            run_job(
                self._service,
                self._files.path(batch.input_file_id),
                journal,
                self._service.config.max_body_bytes,
                on_sync=lambda: batch.count(journal.totals),
            )
        )
        try:
            while not running.done() and batch.status != "cancelling" and self._left_s(batch) > 0:
                await asyncio.wait((running,), timeout=LOOK_S)
            if running.done():
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if len(journal.done) == len(journal.result_ids):
            batch.status, batch.finalizing_at = "finalizing", self._batches.now
        elif batch.status != "cancelling":
            for custom_id in journal.result_ids.keys() - journal.done:
                journal.write_failure(custom_id, "batch_expired", _LATE)
            journal.sync()

    def _finish(self, batch: StoredBatch) -> None:
        """Hand out the results. Every step may be repeated after a crash."""
        self._batches.save(batch)
        output, errors = self._batches.journal_paths(batch)
        if batch.request_counts.completed:
            batch.output_file_id = self._hand_out(batch, output.name, "output")
        if batch.request_counts.failed:
            batch.error_file_id = self._hand_out(batch, errors.name, "errors")
        output.unlink(missing_ok=True)  # empty
        now = self._batches.now
        if batch.status == "cancelling":
            batch.status, batch.cancelled_at = "cancelled", now
        elif batch.status == "finalizing":
            batch.status, batch.completed_at = "completed", now
        else:
            batch.status, batch.expired_at = "expired", now
        self._batches.save(batch)

    def _hand_out(self, batch: StoredBatch, name: str, what: str) -> str:
        output, errors = self._batches.journal_paths(batch)
        file_id = f"file-{batch.id.removeprefix('batch_')}-{what}"
        lifetime_s = self._batches.output_lifetime_s(batch)
        self._files.adopt(output if what == "output" else errors, file_id, name, "batch_output", lifetime_s)
        return file_id

    def _fail(self, batch: StoredBatch, problems: list[LineProblem]) -> None:
        batch.status, batch.failed_at = "failed", self._batches.now
        batch.errors = Errors(data=problems)
        self._batches.save(batch)
