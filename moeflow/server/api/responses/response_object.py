"""What `/v1/responses` gives, whole and as events, in OpenAI's words."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from moeflow.server.api.responses.output_items import ListedItem, OutputItem, OutputReasoningText, OutputText
from moeflow.server.api.schema.batch import InputTokensDetails as CachedTokens
from moeflow.server.api.schema.batch import Metadata, OutputTokensDetails


class ResponseInputDetails(CachedTokens):
    """Of the tokens that went in."""

    cache_write_tokens: int = 0


class ResponseUsage(BaseModel):
    """Tokens in and out."""

    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why there is no answer."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded"]
    message: str


class IncompleteDetails(BaseModel):
    """Why the answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """An answer and its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: Metadata
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"]
    usage: ResponseUsage | None
    user: str | None


class InputTokens(BaseModel):
    """How long a conversation is."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(BaseModel):
    """A response is forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseItemList(BaseModel):
    """A page of what went into a response."""

    object: Literal["list"]
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseLifecycleEvent(BaseModel):
    """The response as a whole has begun or ended."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject


class ResponseItemEvent(BaseModel):
    """An item of the output has begun or ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class ResponsePartEvent(BaseModel):
    """A part of a message, or of reasoning, has begun or ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    output_index: int
    item_id: str
    content_index: int
    part: OutputText | OutputReasoningText


class LikelyToken(BaseModel):
    """A token that could have been chosen."""

    token: str
    logprob: float


class SaidToken(LikelyToken):
    """The token that was chosen, with the likeliest ones."""

    top_logprobs: list[LikelyToken]


class ResponseTextEvent(BaseModel):
    """A piece of a message's text (`delta`), or all of it."""

    type: Literal["response.output_text.delta", "response.output_text.done"]
    sequence_number: int
    output_index: int
    item_id: str
    content_index: int
    delta: str | None = None
    text: str | None = None
    logprobs: list[SaidToken]


class ResponseReasoningEvent(BaseModel):
    """A piece of reasoning (`delta`), or all of it."""

    type: Literal["response.reasoning_text.delta", "response.reasoning_text.done"]
    sequence_number: int
    output_index: int
    item_id: str
    content_index: int
    delta: str | None = None
    text: str | None = None


class ResponseArgumentsEvent(BaseModel):
    """A piece of a call's arguments (`delta`), or all of them."""

    type: Literal["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    sequence_number: int
    output_index: int
    item_id: str
    delta: str | None = None
    arguments: str | None = None


class ResponseInputEvent(BaseModel):
    """A piece of the input of a custom tool (`delta`), or all of it."""

    type: Literal["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    sequence_number: int
    output_index: int
    item_id: str
    delta: str | None = None
    input: str | None = None


RESPONSE_EVENTS: tuple[type[BaseModel], ...] = (
    ResponseLifecycleEvent,
    ResponseItemEvent,
    ResponsePartEvent,
    ResponseTextEvent,
    ResponseReasoningEvent,
    ResponseArgumentsEvent,
    ResponseInputEvent,
)
