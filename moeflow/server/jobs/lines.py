"""The input of a batch job: one request a line, in OpenAI's format, checked as strictly as the endpoints do.

A line that is not a request invalidates the whole file and is reported before the start. A request that the model
cannot answer is an error of its line, later.
"""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import Field, ValidationError

from moeflow.core.units import format_bytes
from moeflow.server.api.schema.batch import Endpoint, LineProblem
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.errors import from_pydantic
from moeflow.server.guard import strict_json

MAX_PROBLEMS = 20  # that are reported of one file


class BatchLine(StrictModel):
    """One request."""

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: Endpoint
    body: dict[str, Any]


class LineError(ValueError):
    """A line is no request; `problem` gives the reason."""

    def __init__(self, problem: LineProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(slots=True)
class Input:
    """The summary of an input file, without the requests."""

    result_ids: dict[str, str] = field(default_factory=dict)  # custom_id -> the id of its result, from the line's bytes
    problems: list[LineProblem] = field(default_factory=list)


def parse_line(number: int, raw: bytes) -> BatchLine:
    """Read one line. Raises: LineError."""
    try:
        request = strict_json.parse(raw)
        if not isinstance(request, dict):
            raise LineError(LineProblem(number, "invalid_line", "the line is no JSON object: {...}"))
        return BatchLine.model_validate(request)
    except strict_json.JsonError as error:
        reason = str(error).replace("the body", "the line", 1)  # it was written for requests
        raise LineError(LineProblem(number, "invalid_json_line", reason)) from None
    except ValidationError as error:
        problem = from_pydantic(error)
        raise LineError(LineProblem(number, "invalid_line", problem.detail, problem.param)) from None


def result_id(raw: bytes) -> str:
    """Return the id under which a line's result is written: the same line has the same."""
    return f"batch_req_{hashlib.blake2b(raw, digest_size=12).hexdigest()}"


def read_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each line that is not blank. Raises: LineError for one that is too long."""
    number = 0
    while raw := file.readline(max_line_bytes + 1):
        number += 1
        if number == 1:
            raw = raw.removeprefix(BOM_UTF8)  # which some editors put before everything
        if len(raw) > max_line_bytes:
            message = f"the line is larger than {format_bytes(max_line_bytes)}"
            raise LineError(LineProblem(number, "line_too_large", message))
        if raw.strip():
            yield number, raw.strip()


def first_model_name(path: Path, max_line_bytes: int) -> str | None:
    """Return the model that the first request of a file names; None: none, or the line is no request."""
    try:
        with path.open("rb") as file:
            number, raw = next(read_lines(file, max_line_bytes))
        name = parse_line(number, raw).body.get("model")
    except (LineError, OSError, StopIteration):  # which the check of the whole input reports
        return None
    return name if isinstance(name, str) else None


def scan(path: Path, *, max_line_bytes: int, max_lines: int | None = None, endpoint: str | None = None) -> Input:
    """Check every line of a file. With `endpoint`, all requests must be for that one. Raises: OSError."""
    found = Input()
    first_seen: dict[str, int] = {}
    with path.open("rb") as file:
        try:
            for number, raw in read_lines(file, max_line_bytes):
                if max_lines is not None and len(found.result_ids) == max_lines:
                    message = f"the file has more than {max_lines} requests; split it"
                    found.problems.append(LineProblem(number, "too_many_requests", message))
                    break
                problem = _check(number, raw, endpoint, found, first_seen)
                if problem is not None:
                    found.problems.append(problem)
                if len(found.problems) == MAX_PROBLEMS:
                    break
        except LineError as error:  # too long to look for the next
            found.problems.append(error.problem)
    if not (found.result_ids or found.problems):
        found.problems.append(LineProblem(1, "empty_file", "the file holds no request"))
    return found


def _check(
    number: int, raw: bytes, endpoint: str | None, found: Input, first_seen: dict[str, int]
) -> LineProblem | None:
    try:
        line = parse_line(number, raw)
    except LineError as error:
        return error.problem
    if line.custom_id in found.result_ids:
        message = f"custom_id {line.custom_id[:80]!r} is that of line {first_seen[line.custom_id]}, too"
        return LineProblem(number, "duplicate_custom_id", message, "custom_id")
    if endpoint is not None and line.url != endpoint:
        message = f"the line is for {line.url}, but the batch is for {endpoint}"
        return LineProblem(number, "mismatched_url", message, "url")
    found.result_ids[line.custom_id] = result_id(raw)
    first_seen[line.custom_id] = number
    return None
