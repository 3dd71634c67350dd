"""Which type of the official clients an answer or an event has to be, and whether it is exactly that.

The clients' models take nearly anything, so JSON is validated strictly here, required fields included. Fields that are
unknown to a client have to be among our own. Where the APIs are documented to send more than the types say, the types
are widened below.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from openai.pagination import SyncCursorPage, SyncPage
from openai.types import (
    Batch,
    Completion,
    CompletionChoice,
    CreateEmbeddingResponse,
    Embedding,
    ErrorObject,
    FileDeleted,
    FileObject,
    Model,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import Logprobs
from openai.types.responses import Response, ResponseFailedEvent, ResponseItem, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import BaseModel, TypeAdapter

OUR_FIELDS = frozenset(("reasoning_content", "token_trees", "prompt_progress", "timings"))
DOCUMENTED_FIELDS = {"ResponseCustomToolCall": frozenset(("status",))}  # in OpenAI's guide to custom tools
# Anthropic's client reads the first, though no type of a body has it; clients of llama.cpp read the others.
ERROR_FIELDS = frozenset(("details", "n_prompt_tokens", "n_ctx"))


class OpenAIError(BaseModel, extra="forbid"):
    """The body of an answer that is an error, and the last event of a stream of chunks that failed."""

    error: ErrorObject


class EchoLogprobs(Logprobs):
    """The first token of an echoed prompt has no log-probability."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class EchoChoice(CompletionChoice):
    """A completion, perhaps with its prompt."""

    logprobs: EchoLogprobs | None = None


class WholeCompletion(Completion):
    """All completions of a request."""

    choices: list[EchoChoice]  # type: ignore[assignment]


class ChoicePart(EchoChoice):
    """A part of a completion has no reason to end yet."""

    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class CompletionChunk(Completion):
    """An event of a stream of completions."""

    choices: list[ChoicePart]  # type: ignore[assignment]


class EncodedEmbedding(Embedding):
    """A vector, which comes as base64 where the client asks for that."""

    embedding: list[float] | str  # type: ignore[assignment]


class Embeddings(CreateEmbeddingResponse):
    """All vectors of a request."""

    data: list[EncodedEmbedding]  # type: ignore[assignment]


class FailureOfResponse(BaseModel, extra="forbid"):
    """Why a response failed. Codex reads a code that the client's type lacks."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded"]
    message: str


class FailedResponse(Response):
    """A response that failed."""

    error: FailureOfResponse | None = None  # type: ignore[assignment]


class FailedEvent(ResponseFailedEvent):
    """The last event of a response that failed."""

    response: FailedResponse


class TooLarge(BaseModel, extra="forbid"):
    """The error of a body that is too large, which Anthropic's page of errors has."""

    type: Literal["request_too_large"]
    message: str


class TooLargeResponse(BaseModel, extra="forbid"):
    """The whole answer with that error."""

    type: Literal["error"]
    error: TooLarge
    request_id: str | None


class Ping(BaseModel, extra="forbid"):
    """The event of messages that their client drops before it has a type."""

    type: str


def _by_type(union: Any) -> dict[str, Any]:
    """Return the members of a union by the values of their field `type`."""
    members = get_args(get_args(union)[0])
    return {value: member for member in members for value in get_args(member.model_fields["type"].annotation)}


CHUNKS = {"/v1/chat/completions": ChatCompletionChunk, "/v1/completions": CompletionChunk}
RESPONSE_EVENTS = {**_by_type(ResponseStreamEvent), "response.failed": FailedEvent}
MESSAGE_EVENTS = {**_by_type(RawMessageStreamEvent), "ping": Ping, "error": ErrorResponse}
GENERATED = {
    "POST /v1/chat/completions": ChatCompletion,
    "POST /v1/completions": WholeCompletion,
    "POST /v1/responses": Response,
    "GET /v1/responses/[^/]+": Response,
    "POST /v1/messages": Message,
}
OTHERS = {
    "POST /v1/responses/input_tokens": InputTokenCountResponse,
    "GET /v1/responses/[^/]+/input_items": SyncCursorPage[ResponseItem],
    "POST /v1/messages/count_tokens": MessageTokensCount,
    "POST /v1/embeddings": Embeddings,
    "GET /v1/models": SyncPage[Model],
    "GET /v1/models/.+": Model,
    "(POST /v1/files|GET /v1/files/[^/]+)": FileObject,
    "GET /v1/files": SyncCursorPage[FileObject],
    "DELETE /v1/files/[^/]+": FileDeleted,
    "(POST /v1/batches|GET /v1/batches/[^/]+|POST /v1/batches/[^/]+/cancel)": Batch,
    "GET /v1/batches": SyncCursorPage[Batch],
}


def check_answer(method: str, path: str, encoded: bytes) -> None:
    """Raise unless a whole answer of success is strictly of the client's type. Some paths are unknown to clients."""
    for pattern, kind in (GENERATED | OTHERS).items():
        if re.fullmatch(pattern, f"{method} {path}"):
            value = check_json(kind, encoded)
            if pattern in GENERATED:
                check_no_extras(value)


def check_error(path: str, encoded: bytes) -> None:
    """Raise unless the body of an error is strictly of the type that the path's client reads."""
    kind = ErrorResponse | TooLargeResponse if f"{path}/".startswith("/v1/messages/") else OpenAIError
    check_no_extras(check_json(kind, encoded), ERROR_FIELDS)


def check_event(path: str, data: Mapping[str, Any], encoded: bytes) -> None:
    """Raise unless an event of a stream is strictly of the client's type."""
    if "error" in data and path in CHUNKS:
        check_error(path, encoded)
        return
    if path in CHUNKS:
        kind = CHUNKS[path]
    else:
        kind = (MESSAGE_EVENTS if path == "/v1/messages" else RESPONSE_EVENTS)[data["type"]]
    check_no_extras(check_json(kind, encoded))


def check_json(kind: Any, encoded: bytes) -> Any:
    """Return what JSON says, or raise unless it is strictly of a type."""
    return _adapter(kind).validate_json(encoded, strict=True)


def check_no_extras(value: object, known: frozenset[str] = OUR_FIELDS) -> None:
    """Raise if a model, or one in it, has a field that neither the client knows nor `known` names."""
    if isinstance(value, BaseModel):
        unknown = set(value.model_extra or ()) - known - DOCUMENTED_FIELDS.get(type(value).__name__, frozenset())
        assert not unknown, f"{type(value).__name__} does not know {sorted(unknown)}"
        for name in type(value).model_fields:
            check_no_extras(getattr(value, name), known)
    elif isinstance(value, list):
        for item in value:
            check_no_extras(item, known)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
