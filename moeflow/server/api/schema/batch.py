"""What `/v1/batches` takes and gives, in OpenAI's words; jobs are kept on disk in the same form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from moeflow.server.api.schema.file import MAX_LIFETIME_S, MIN_LIFETIME_S
from moeflow.server.api.schema.strict_model import Record, StrictModel

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class OutputExpiresAfter(StrictModel):
    """How long results are kept."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S)


class BatchRequest(StrictModel):
    """Answer a file of requests."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Why a line of the input is no request."""

    line: int | None  # from 1; None: it is not a line's fault
    code: str
    message: str
    param: str | None = None


class BatchErrors(Record):
    """Why the batch failed before it began."""

    object: Literal["list"] = "list"
    data: list[LineProblem]


class RequestCounts(Record):
    """How far it is."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(Record):
    """Of the tokens that went in."""

    cached_tokens: int = 0


class OutputTokensDetails(Record):
    """Of the tokens that came out."""

    reasoning_tokens: int = 0


class BatchUsage(Record):
    """Tokens of all answers so far."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = Field(default_factory=InputTokensDetails)
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = Field(default_factory=OutputTokensDetails)
    total_tokens: int = 0


class BatchObject(Record):
    """A job's description."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str  # "unknown" of a batch whose record was damaged
    model: str  # that answers it; another one leaves it alone
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = Field(default_factory=RequestCounts)
    usage: BatchUsage = Field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None


class BatchList(BaseModel):
    """A page of them."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
