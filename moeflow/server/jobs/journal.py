"""The results of a batch job: two files that only grow until its end, a line a result, and that show how far it is.

One holds answers, the other errors; a request is done once it stands in either. A result's id is made of its
request's line, so that files that belong to another input are noticed. After a kill, a last line that was
half written is cut off and its request runs again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from moeflow.core.errors import ConfigError
from moeflow.server.jobs.result_order import sort_results

_BEGINNING = b'{"id":"batch_req_'  # of every line of ours
EXPIRED = "batch_expired"  # OpenAI's code of a request whose time was up
_REMEDY = "choose another output file, or move this one away"


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _TokenCounts(msgspec.Struct):
    """Token counts, which responses call otherwise."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Body(msgspec.Struct):
    model: str | None = None
    usage: _TokenCounts | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Error(msgspec.Struct):
    code: str


class _Record(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None = None


@dataclass(slots=True)
class Totals:
    """What the results come to."""

    completed: int = 0
    failed: int = 0
    expired: int = 0  # of failed ones
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class JournalError(ConfigError):
    """A file of results cannot be added to. `problem` names no path; `totals` counts the results that can be read."""

    def __init__(self, path: Path, problem: str, totals: Totals | None = None) -> None:
        super().__init__(f"{path}: {problem}; {_REMEDY}")
        self.problem = problem
        self.totals = totals or Totals()


class ResultJournal:
    """Writes results, and knows which requests are done. Use it in a `with` block, or close it."""

    def __init__(self, output: Path, errors: Path, result_ids: Mapping[str, str], model: str | None) -> None:
        """Open or make the files, and go on where they end. `result_ids` are the input's, by custom_id.

        `model` None: the input cannot be read any more, so any results are taken for its own.

        Raises: JournalError if a file is in use, or holds anything but results of this input by this model. The file is
        then unchanged. OSError.
        """
        self.done: set[str] = set()
        self.totals = Totals()
        self.result_ids = result_ids
        self._model = model
        self._output_path, self._errors_path = output, errors
        self._output = _open_alone(output)
        self._errors: FileIO | None = None
        self._problems: list[tuple[Path, str]] = []
        self._is_dirty = False
        try:
            ends = {output: self._read(output, has_failed=False)}
            if errors.exists():
                self._errors = _open_alone(errors)
                ends[errors] = self._read(errors, has_failed=True)
            self._check_problems()
            for path, end in ends.items():
                os.truncate(path, end)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ResultJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_answer(self, custom_id: str, request_id: str, body: dict[str, Any]) -> None:
        """Append an endpoint's answer."""
        self._append(self._output, custom_id, {"status_code": 200, "request_id": request_id, "body": body}, None)

    def write_refusal(self, custom_id: str, request_id: str, status_code: int, body: dict[str, Any]) -> None:
        """Append an endpoint's error object."""
        response = {"status_code": status_code, "request_id": request_id, "body": body}
        self._append(self._errors_file(), custom_id, response, None)

    def write_failure(self, custom_id: str, code: str, message: str) -> None:
        """Append why a request was never answered."""
        self._append(self._errors_file(), custom_id, None, {"code": code, "message": message})

    def sync(self) -> None:
        """Make written results survive a loss of power. Blocks: on the disk."""
        if self._is_dirty:
            self._is_dirty = False
            for file in (self._output, self._errors):
                if file is not None:
                    os.fsync(file.fileno())

    def put_in_order(self) -> None:
        """Sort results by their requests' lines. Nothing can be written afterwards.

        Blocks: on the disk.
        Raises: OSError.
        """
        positions = {custom_id: number for number, custom_id in enumerate(self.result_ids)}
        for path in (self._output_path, self._errors_path):
            if path.exists():
                sort_results(path, positions)

    def close(self) -> None:
        """Close the files."""
        for file in (self._output, self._errors):
            if file is not None:
                file.close()

    def _append(
        self, file: FileIO, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
    ) -> None:
        assert custom_id not in self.done
        record = {"id": self.result_ids[custom_id], "custom_id": custom_id, "response": response, "error": error}
        line = msgspec.json.encode(record)
        _write_whole(file, line + b"\n")
        self._is_dirty = True
        self._count(msgspec.json.decode(line, type=_Record), has_failed=file is self._errors)

    def _count(self, record: _Record, *, has_failed: bool) -> None:
        self.done.add(record.custom_id)
        totals = self.totals
        totals.failed += has_failed
        totals.completed += not has_failed
        totals.expired += record.error is not None and record.error.code == EXPIRED
        usage = record.response.body.usage if record.response is not None else None
        if usage is not None:
            details = (usage.prompt_tokens_details, usage.input_tokens_details)
            totals.prompt_tokens += usage.prompt_tokens + usage.input_tokens
            totals.cached_tokens += sum(one.cached_tokens for one in details)
            totals.completion_tokens += usage.completion_tokens + usage.output_tokens

    def _errors_file(self) -> FileIO:
        if self._errors is None:
            self._errors = _open_alone(self._errors_path)
        return self._errors

    def _read(self, path: Path, *, has_failed: bool) -> int:
        """Take in what an earlier run has written; return where the last whole line ends."""
        end = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        self._take_in(path, number, line, has_failed=has_failed)
                        end += len(line)
                    elif not (line.startswith(_BEGINNING) or _BEGINNING.startswith(line) or not line.strip(b"\0")):
                        self._problems.append((path, "it ends in something that is no result of a batch job"))
        except OSError as error:
            self._problems.append((path, f"it cannot be read: {error.strerror}"))
        return end

    def _take_in(self, path: Path, number: int, line: bytes, *, has_failed: bool) -> None:
        try:
            record = msgspec.json.decode(line, type=_Record)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._problems.append((path, f"line {number} is no result of a batch job"))
            return
        problem = self._problem_of(record)
        if problem is not None:
            self._problems.append((path, f"line {number} {problem}"))
        if record.custom_id not in self.done:
            self._count(record, has_failed=has_failed)

    def _problem_of(self, record: _Record) -> str | None:
        """Return why a record is no result of this job that is still to come."""
        name = record.custom_id[:80]
        if record.custom_id in self.done:
            return f"answers {name!r} for the second time"
        if self._model is None:
            return None
        if record.custom_id not in self.result_ids:
            return f"answers {name!r}, which the input does not ask: another job's"
        if record.id != self.result_ids[record.custom_id]:
            return f"answers another request {name!r} than the input has now"
        answered_by = record.response.body.model if record.response is not None else None
        if answered_by not in (None, self._model):
            return f"was answered by {answered_by!r}, but the model is {self._model!r} now"
        return None

    def _check_problems(self) -> None:
        """Raise JournalError if there is a problem."""
        if self._problems:
            path, problem = self._problems[0]
            raise JournalError(path, problem, self.totals)


def _open_alone(path: Path) -> FileIO:
    """Open a file to append to.

    Raises: JournalError if another job has it open, or it cannot be read again; OSError.
    """
    if path.exists() and not path.is_file():
        raise JournalError(path, "it is no regular file, so results could not be read again")
    try:
        file = path.open("ab", buffering=0)
    except PermissionError:
        raise JournalError(path, "it may not be written to") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise JournalError(path, "another job is writing to it") from None
    return file


def _write_whole(file: FileIO, line: bytes) -> None:
    """Append a line, or nothing. Raises: OSError."""
    start = os.fstat(file.fileno()).st_size
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        os.ftruncate(file.fileno(), start)  # or the next result would begin in the middle of a line
        raise
