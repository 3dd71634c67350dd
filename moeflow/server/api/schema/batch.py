"""What `/v1/batches` takes and gives, in OpenAI's words."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from moeflow.server.api.schema.file import MAX_LIFETIME_S, MIN_LIFETIME_S
from moeflow.server.api.schema.strict_model import StrictModel

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
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


class BatchErrorObject(BaseModel):
    """What is wrong with one line of the input."""

    line: int | None
    code: str
    message: str
    param: str | None


class BatchErrors(BaseModel):
    """Why the batch failed before it began."""

    object: Literal["list"]
    data: list[BatchErrorObject]


class RequestCounts(BaseModel):
    """How far it is."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(BaseModel):
    """Of the tokens that went in."""

    cached_tokens: int


class OutputTokensDetails(BaseModel):
    """Of the tokens that came out."""

    reasoning_tokens: int


class BatchUsageObject(BaseModel):
    """Tokens of all answers so far."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchObject(BaseModel):
    """A job's description."""

    id: str
    object: Literal["batch"]
    endpoint: str  # "unknown" of a batch whose record was damaged
    model: str
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    errors: BatchErrors | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsageObject
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    """A page of them."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
