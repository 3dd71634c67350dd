"""Answers and events of OpenAI's Responses, as its API reference has them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from moeflow.cli.check.openai_shapes import Count, Text

Status = Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]


class OutputText(msgspec.Struct):
    """Part of an answer's text."""

    type: Literal["output_text", "refusal"]
    annotations: list[Any]
    text: str = ""


class Item(msgspec.Struct):
    """An item of the output: a message, a call, a reasoning, or another."""

    type: Text
    id: Text
    role: str | None = None
    status: str | None = None
    content: list[OutputText] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class Usage(msgspec.Struct):
    """Tokens of a request."""

    input_tokens: Count
    output_tokens: Count
    total_tokens: Count
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class IncompleteDetails(msgspec.Struct):
    """Why a response is not complete."""

    reason: str


class Response(msgspec.Struct):
    """Answer of `/v1/responses`."""

    id: Text
    object: Literal["response"]
    created_at: float
    model: Text
    status: Status
    output: list[Item]
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[Any]
    usage: Usage | None = None
    error: Any = None
    incomplete_details: IncompleteDetails | None = None
    previous_response_id: str | None = None

    def text(self) -> str:
        """Return the text of all its messages."""
        items = [item for item in self.output if item.type == "message"]
        return "".join(part.text for item in items for part in item.content or ())


class Event(msgspec.Struct):
    """Any event of a stream."""

    type: Text
    sequence_number: Count
    response: Response | None = None
    delta: str | None = None
