"""Works through the jobs of `/v1/batches`, oldest first, and takes each through its states.

The state for resuming is always on disk. After a kill the next start finds the unfinished jobs, and their journals show
the finished requests. Each step of finishing may happen twice. While no model is served, or
another than a job is for, the job waits; its time runs all the same. It waits, too, while the disk is full. A damaged
file ends its job, and no other.

validating -> failed, if the input is none
validating -> in_progress -> finalizing -> completed
validating or in_progress -> expired, or cancelling -> cancelled, with the results there are

Source: OpenAI's batch guide and reference (statuses, partial results, `batch_expired`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

from moeflow.core.errors import EngineError
from moeflow.server.api.schema.batch import BatchErrors, BatchObject, LineProblem, RequestCounts
from moeflow.server.jobs.batch_store import FINAL, BatchStore, Outcome, count, result_file_ids
from moeflow.server.jobs.file_store import FileStore
from moeflow.server.jobs.journal import EXPIRED, JournalError, ResultJournal
from moeflow.server.jobs.lines import Input, scan
from moeflow.server.jobs.runner import ModelMissingError, run_job
from moeflow.server.service import Service

logger = logging.getLogger(__name__)

MAX_LINES = 50_000  # OpenAI's limit
LOOK_S = 0.2  # how soon a cancellation is noticed
ENGINE_RETRY_S = 1.0
LOAD_RETRY_S = 30.0  # the operator must fix the model, or free memory
DISK_RETRY_S = 10.0  # the operator must free disk space
BREATH = 100  # lines that are written before others are let in
_LATE = "This request could not be executed before the completion window expired."


class BatchWorker:
    """One at a time: the engine batches requests anyway, and the first job finishes first."""

    def __init__(self, service: Service, batches: BatchStore, files: FileStore) -> None:
        self._service = service
        self._batches = batches
        self._files = files
        self._task: asyncio.Task[None] | None = None
        self._current: BatchObject | None = None  # the current job
        self._news = asyncio.Event()  # a job has come, or was cancelled

    def wake(self) -> None:
        """Look for work, now and from now on. To be called in the event loop of the server."""
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    def finish_settled(self) -> None:
        """Publish settled results of an earlier server, without waiting for a model."""
        for batch in self._batches.unfinished():
            if self._batches.outcome(batch) is not None:
                with contextlib.suppress(OSError):  # once there is space, `wake` retries
                    self._finish(batch)

    async def stop(self) -> None:
        """Leave the running job unfinished; the next start resumes it."""
        task, self._task = self._task, None
        batch = self._current
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if batch is not None and batch.status not in FINAL:
            with contextlib.suppress(OSError):
                self._batches.change(batch)  # its progress, for status requests before it resumes

    def cancel(self, batch: BatchObject) -> None:
        """Ask for a job's end. Does nothing if it has come to one. Raises: OSError."""
        now = self._batches.now
        if batch.status == "validating" and batch is not self._current:  # another runs, and may run for hours
            self._batches.change(batch, outcome="cancelled", status="cancelled", cancelling_at=now, cancelled_at=now)
        elif batch.status in ("validating", "in_progress") and self._batches.outcome(batch) is None:
            self._batches.change(batch, status="cancelling", cancelling_at=now)
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

    def _next(self) -> BatchObject | None:
        """Return the first job for which something can be done."""
        for batch in self._batches.unfinished():
            if self._batches.outcome(batch) is not None or self._is_over(batch) or self._is_served(batch):
                return batch
        return None

    def _is_over(self, batch: BatchObject) -> bool:
        """Return whether no more of a job's requests are to begin."""
        return batch.status == "cancelling" or self._left_s(batch) <= 0

    def _is_served(self, batch: BatchObject) -> bool:
        return self._service.is_lasting(batch.model)

    def _left_s(self, batch: BatchObject) -> float:
        return self._batches.left_s(batch)

    def _until_next_expiry(self) -> float | None:
        waiting = [self._left_s(batch) for batch in self._batches.unfinished()]
        return max(min(waiting), 0.1) if waiting else None

    async def _advance(self, batch: BatchObject) -> None:
        """Take a job to its end, unless something stands in its way."""
        try:
            try:
                await self._to_its_end(batch)
            except (EngineError, OSError):
                raise
            except JournalError as error:
                logger.error("batch %s ends: %s", batch.id, error)
                count(batch, error.totals)
                self._fail(batch, "results_damaged", f"results on the server's disk are damaged: {error.problem}")
            except Exception:
                logger.exception("batch %s failed", batch.id)
                self._fail(batch, "internal_error", "the server failed on this batch; its log has the details")
        except EngineError as error:  # not the job's fault: a later start resumes it
            logger.warning("batch %s waits: %s", batch.id, error)
            await asyncio.sleep(LOAD_RETRY_S if isinstance(error, ModelMissingError) else ENGINE_RETRY_S)
        except OSError as error:
            logger.warning("batch %s waits, its results cannot be written: %s", batch.id, error)
            await asyncio.sleep(DISK_RETRY_S)

    def _fail(self, batch: BatchObject, code: str, message: str) -> None:
        """End a job whose results cannot be completed; one that is being cancelled ends as that."""
        if self._batches.outcome(batch) is None:
            outcome: Outcome = "cancelled" if batch.status == "cancelling" else "failed"
            self._batches.change(batch, outcome=outcome, errors=BatchErrors(data=[LineProblem(None, code, message)]))
        self._finish(batch)

    async def _to_its_end(self, batch: BatchObject) -> None:
        if self._batches.outcome(batch) is None:
            found = await asyncio.to_thread(self._scan, batch)
            if found.problems and batch.status == "validating":
                self._batches.change(batch, outcome="failed", errors=BatchErrors(data=found.problems))
            else:
                await self._settle(batch, found)
        self._finish(batch)

    def _scan(self, batch: BatchObject) -> Input:
        source, max_line_bytes = self._files.path(batch.input_file_id), self._service.config.max_body_bytes
        try:
            return scan(source, max_line_bytes=max_line_bytes, max_lines=MAX_LINES, endpoint=batch.endpoint)
        except OSError as error:
            message = f"the input file cannot be read: {error.strerror}"
            return Input(problems=[LineProblem(None, "input_file_unreadable", message)])

    async def _settle(self, batch: BatchObject, found: Input) -> None:
        """Bring a job as far as it comes. An input that had no problems once may have some now: it was damaged."""
        if batch.status == "validating":
            counts = RequestCounts(total=len(found.result_ids))
            now = self._batches.now
            self._batches.change(batch, status="in_progress", in_progress_at=now, request_counts=counts)
        model = None if found.problems else batch.model
        with ResultJournal(*self._batches.journal_paths(batch), found.result_ids, model) as journal:
            count(batch, journal.totals)
            if not (found.problems or self._is_over(batch)):
                await self._answer(batch, journal)
            is_done = not found.problems and journal.done >= journal.result_ids.keys()
            if self._is_over(batch) and not is_done:
                await self._write_expired(batch, journal)
            journal.sync()
            count(batch, journal.totals)
            if not found.problems:
                await asyncio.to_thread(journal.put_in_order)
        if batch.status == "cancelling":
            self._batches.change(batch, outcome="cancelled")
        elif is_done and not journal.totals.expired:
            now = self._batches.now
            self._batches.change(batch, outcome="completed", status="finalizing", finalizing_at=now)
        elif found.problems and not self._is_over(batch):
            self._batches.change(batch, outcome="failed", errors=BatchErrors(data=found.problems))
        else:
            self._batches.change(batch, outcome="expired")

    async def _answer(self, batch: BatchObject, journal: ResultJournal) -> None:
        """Run a job until it is done, cancelled or out of time."""
        running = asyncio.create_task(
            run_job(
                self._service,
                self._files.path(batch.input_file_id),
                journal,
                self._service.config.max_body_bytes,
                on_sync=lambda: count(batch, journal.totals),
                model=batch.model,
            )
        )
        try:
            while not running.done() and not self._is_over(batch):
                await asyncio.wait((running,), timeout=LOOK_S)
            if running.done():
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            count(batch, journal.totals)

    async def _write_expired(self, batch: BatchObject, journal: ResultJournal) -> None:
        """Write errors for requests that missed the deadline, unless the job is cancelled."""
        missing = [custom_id for custom_id in journal.result_ids if custom_id not in journal.done]
        for number, custom_id in enumerate(missing):
            if batch.status == "cancelling":
                return
            journal.write_failure(custom_id, EXPIRED, _LATE)
            if number % BREATH == BREATH - 1:
                await asyncio.sleep(0)

    def _finish(self, batch: BatchObject) -> None:
        """Publish a settled job's results. Every step may be repeated after a crash."""
        outcome = self._batches.outcome(batch)
        assert outcome is not None, "only settled jobs are finished"
        output_file_id, error_file_id = (
            self._hand_out(batch, journal, file_id)
            for journal, file_id in zip(self._batches.journal_paths(batch), result_file_ids(batch), strict=True)
        )
        when: dict[str, Any] = {f"{outcome}_at": self._batches.now}
        self._batches.change(batch, status=outcome, output_file_id=output_file_id, error_file_id=error_file_id, **when)

    def _hand_out(self, batch: BatchObject, journal: Path, file_id: str) -> str | None:
        """Make a file of a journal; return its id, or None if nothing is in it."""
        if journal.exists() and not journal.stat().st_size:
            journal.unlink()
        if not journal.exists() and not self._files.path(file_id).exists():
            return None
        self._files.adopt(journal, file_id, journal.name, "batch_output", self._batches.output_lifetime_s(batch))
        return file_id
