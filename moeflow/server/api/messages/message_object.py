"""What `/v1/messages` gives, whole and as events, in Anthropic's words."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from moeflow.server.api.messages.block_types import AnsweredBlock

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokens(BaseModel):
    """Of the tokens that came out."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """Tokens in and out. Those of the prompt that were found in the cache are counted apart."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: ThinkingTokens


class MessageObject(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """How long a conversation is."""

    input_tokens: int


class MessageStartEvent(BaseModel):
    """An answer begins."""

    type: Literal["message_start"]
    message: MessageObject


class BlockStartEvent(BaseModel):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnsweredBlock


class MessageTextDelta(BaseModel):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(BaseModel):
    """More of what the model says to itself."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(BaseModel):
    """The end of what the model says to itself."""

    type: Literal["signature_delta"]
    signature: str


class InputDelta(BaseModel):
    """More of a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDeltaEvent(BaseModel):
    """A block grows."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[MessageTextDelta | ThinkingDelta | SignatureDelta | InputDelta, Field(discriminator="type")]


class BlockStopEvent(BaseModel):
    """A block ends."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(BaseModel):
    """Why an answer ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDeltaEvent(BaseModel):
    """An answer is about to end."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStopEvent(BaseModel):
    """An answer ends."""

    type: Literal["message_stop"]


class PingEvent(BaseModel):
    """Nothing."""

    type: Literal["ping"]


MESSAGE_EVENTS: tuple[type[BaseModel], ...] = (
    MessageStartEvent,
    BlockStartEvent,
    BlockDeltaEvent,
    BlockStopEvent,
    MessageDeltaEvent,
    MessageStopEvent,
    PingEvent,
)
