"""The jobs behind `/v1/batches`: one description each, in OpenAI's words, on disk at every change of state.

A job whose results are complete is *settled*: they never change again. Only publishing them and recording the end
remain. A job whose description was damaged is settled as failed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from moeflow.server.api.schema.batch import (
    BatchErrors,
    BatchObject,
    BatchUsage,
    InputTokensDetails,
    LineProblem,
    Status,
)
from moeflow.server.api.schema.strict_model import Record
from moeflow.server.jobs.atomic_file import made_at, new_id, read_all, write_json
from moeflow.server.jobs.job_clock import JobClock
from moeflow.server.jobs.journal import Totals

WINDOW_S = 24 * 3600  # the only completion window that OpenAI has
Outcome = Literal["failed", "completed", "expired", "cancelled"]
FINAL: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")


class _Saved(Record):
    """The stored form: the description, and internal fields."""

    batch: BatchObject
    output_lifetime_s: int | None = None
    outcome: Outcome | None = None  # once it is settled


class BatchStore:
    """All jobs of one data folder, by id."""

    def __init__(self, folder: Path, clock: JobClock) -> None:
        """Load the stored jobs. Raises: OSError."""
        self._folder = folder
        self._clock = clock
        folder.mkdir(mode=0o700, exist_ok=True)
        self._saved, damaged = read_all(folder, _Saved, lambda saved: saved.batch.id)
        for batch_id in damaged:
            self._saved[batch_id] = _Saved(batch=_damaged(batch_id), outcome="failed")

    @property
    def now(self) -> int:
        """The time in unix seconds."""
        return int(self._clock.now())

    def left_s(self, batch: BatchObject) -> float:
        """Return the time until a job's completion window ends."""
        return batch.expires_at - self._clock.certain()

    def find(self, batch_id: str) -> BatchObject | None:
        """Return a job."""
        saved = self._saved.get(batch_id)
        return None if saved is None else saved.batch

    def all(self) -> list[BatchObject]:
        """Return all jobs, newest first."""
        batches = [saved.batch for saved in self._saved.values()]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def unfinished(self) -> list[BatchObject]:
        """Return the jobs that are not in their last state, oldest first."""
        return [batch for batch in reversed(self.all()) if batch.status not in FINAL]

    def needs(self, file_id: str) -> bool:
        """Whether an unfinished job reads this file, or is handing it out."""
        return any(file_id in (batch.input_file_id, *result_file_ids(batch)) for batch in self.unfinished())

    def result_bytes(self) -> int:
        """Return how much the results of unfinished jobs take so far."""
        journals = (path for batch in self.unfinished() for path in self.journal_paths(batch))
        return sum(path.stat().st_size for path in journals if path.exists())

    def create(
        self,
        *,
        endpoint: str,
        model: str,
        input_file_id: str,
        metadata: dict[str, str] | None,
        output_lifetime_s: int | None,
    ) -> BatchObject:
        """Make a job. Raises: OSError."""
        batch = BatchObject(
            id=new_id("batch_", self._clock.now()),
            endpoint=endpoint,
            model=model,
            input_file_id=input_file_id,
            created_at=self.now,
            expires_at=self.now + WINDOW_S,
            metadata=metadata,
        )
        saved = _Saved(batch=batch, output_lifetime_s=output_lifetime_s)
        write_json(self._folder / f"{batch.id}.json", saved)
        self._saved[batch.id] = saved
        return batch

    def change(self, batch: BatchObject, *, outcome: Outcome | None = None, **fields: Any) -> None:
        """Change a job's description, on disk first; with `outcome`, settle it.

        Raises: OSError if it cannot be written; then nothing has changed.
        """
        saved = self._saved[batch.id]
        new = saved.model_copy(update={"batch": batch.model_copy(update=fields), "outcome": outcome or saved.outcome})
        write_json(self._folder / f"{batch.id}.json", new)
        saved.outcome = new.outcome
        for name, value in fields.items():
            setattr(batch, name, value)

    def outcome(self, batch: BatchObject) -> Outcome | None:
        """Return what a settled job will be in the end; None: it is not settled."""
        outcome: Outcome | None = self._saved[batch.id].outcome
        return outcome

    def output_lifetime_s(self, batch: BatchObject) -> int | None:
        """Return how long a job's results are kept; None: until they are deleted."""
        lifetime_s: int | None = self._saved[batch.id].output_lifetime_s
        return lifetime_s

    def journal_paths(self, batch: BatchObject) -> tuple[Path, Path]:
        """Return where a job's answers and errors are while it is not finished."""
        return self._folder / f"{batch.id}.output.jsonl", self._folder / f"{batch.id}.errors.jsonl"


def count(batch: BatchObject, totals: Totals) -> None:
    """Take over what a journal has counted."""
    batch.request_counts.completed, batch.request_counts.failed = totals.completed, totals.failed
    batch.usage = BatchUsage(
        input_tokens=totals.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=totals.cached_tokens),
        output_tokens=totals.completion_tokens,
        total_tokens=totals.prompt_tokens + totals.completion_tokens,
    )


def result_file_ids(batch: BatchObject) -> tuple[str, str]:
    """Return the file ids of a job's answers and errors."""
    name = batch.id.removeprefix("batch_")
    return f"file-{name}-output", f"file-{name}-errors"


def _damaged(batch_id: str) -> BatchObject:
    """Return a job with a damaged description, as far as known."""
    message = "the server's description of this batch is damaged: fetch what results there are, and create it again"
    return BatchObject(
        id=batch_id,
        endpoint="unknown",
        model="unknown",
        input_file_id="unknown",
        status="in_progress",
        errors=BatchErrors(data=[LineProblem(None, "description_damaged", message)]),
        created_at=made_at(batch_id),
        expires_at=made_at(batch_id) + WINDOW_S,
    )
