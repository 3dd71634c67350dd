"""Answers and events of OpenAI's completions, chat, models and embeddings, as its API reference has them.

Unknown fields pass. A field without default is required.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Text = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Logprob = Annotated[float, msgspec.Meta(le=0)]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class Model(msgspec.Struct):
    """A served model."""

    id: Text
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(msgspec.Struct):
    """All served models."""

    object: Literal["list"]
    data: list[Model]


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion, one list entry a token."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One completion."""

    index: Count
    text: str
    finish_reason: FinishReason
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct):
    """Answer of `/v1/completions`."""

    id: Text
    object: Literal["text_completion"]
    created: int
    model: Text
    choices: list[CompletionChoice]
    usage: Usage


class CompletionPart(msgspec.Struct):
    """Part of one completion."""

    index: Count
    text: str
    finish_reason: FinishReason | None = None


class CompletionChunk(msgspec.Struct):
    """Event of `/v1/completions`."""

    id: Text
    object: Literal["text_completion"]
    created: int
    model: Text
    choices: list[CompletionPart]
    usage: Usage | None = None


class Function(msgspec.Struct):
    """A called function."""

    name: Text
    arguments: str


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: Text
    type: Literal["function"]
    function: Function


class TokenLogprob(msgspec.Struct):
    """A likely token."""

    token: str
    logprob: Logprob
    bytes: list[int] | None = None


class ContentLogprob(TokenLogprob, kw_only=True):
    """A token of the answer."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a message."""

    content: list[ContentLogprob] | None


class Message(msgspec.Struct):
    """An answer's message."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct):
    """One answer."""

    index: Count
    message: Message
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct):
    """Answer of `/v1/chat/completions`."""

    id: Text
    object: Literal["chat.completion"]
    created: int
    model: Text
    choices: list[Choice]
    usage: Usage


class FunctionPart(msgspec.Struct):
    """Part of a called function."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPart(msgspec.Struct):
    """Part of a call; only the first one has an id."""

    index: Count
    id: str | None = None
    function: FunctionPart | None = None


class Delta(msgspec.Struct):
    """Part of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChoicePart(msgspec.Struct):
    """Part of one answer."""

    index: Count
    delta: Delta
    finish_reason: FinishReason | None = None


class ChatChunk(msgspec.Struct):
    """Event of `/v1/chat/completions`."""

    id: Text
    object: Literal["chat.completion.chunk"]
    created: int
    model: Text
    choices: list[ChoicePart]
    usage: Usage | None = None


class Error(msgspec.Struct):
    """Reason of a refusal."""

    message: Text
    type: Text
    param: str | None = None
    code: Any = None


class ErrorAnswer(msgspec.Struct):
    """Answer of a refusal."""

    error: Error


class EmbeddingUsage(msgspec.Struct):
    """Tokens of embedded texts."""

    prompt_tokens: Count
    total_tokens: Count


class Embedding(msgspec.Struct):
    """The vector of one text; a text if base64 was asked for."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    """Answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: Text
    usage: EmbeddingUsage
