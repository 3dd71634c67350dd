"""Answers and events of Anthropic's Messages, as its API reference has them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from moeflow.cli.check.openai_shapes import Count, Text

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal"]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of an answer."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: Text
    name: Text
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class Usage(msgspec.Struct):
    """Tokens of a request. `input_tokens` are those outside the cache."""

    input_tokens: Count
    output_tokens: Count
    cache_creation_input_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None

    def prompt_tokens(self) -> int:
        """Return the length of the prompt."""
        return self.input_tokens + (self.cache_creation_input_tokens or 0) + (self.cache_read_input_tokens or 0)


class Message(msgspec.Struct):
    """Answer of `/v1/messages`."""

    id: Text
    type: Literal["message"]
    role: Literal["assistant"]
    model: Text
    content: list[Block]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: Usage


class StartedMessage(msgspec.Struct):
    """A message that begins."""

    id: Text
    type: Literal["message"]
    role: Literal["assistant"]
    model: Text
    content: list[Block]
    usage: Usage
    stop_reason: None = None


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """First event."""

    message: StartedMessage


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: Count
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """Part of a text."""

    text: str


class JsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """Part of a call's input."""

    partial_json: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """Part of a reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """Signature of a reasoning."""

    signature: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """Part of a block."""

    index: Count
    delta: TextDelta | JsonDelta | ThinkingDelta | SignatureDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: Count


class EndDelta(msgspec.Struct):
    """Why a message ends."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class DeltaUsage(msgspec.Struct):
    """Tokens so far."""

    output_tokens: Count


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The end of a message, with its counts."""

    delta: EndDelta
    usage: DeltaUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """Last event."""


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """May come at any time."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping


class Error(msgspec.Struct):
    """Reason of a refusal."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
    ]
    message: Text


class ErrorAnswer(msgspec.Struct):
    """Answer of a refusal."""

    type: Literal["error"]
    error: Error


class TokenCount(msgspec.Struct):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: Count
