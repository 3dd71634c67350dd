"""Messages of `/v1/messages` and the blocks that they are made of, in Anthropic's words."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, Tag

from moeflow.server.api.conversation.turns import Turns
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.api.schema.tagged import by_type, known_types, text_or_list

_REASONS: Final = {
    **dict.fromkeys(("image", "document", "search_result"), "the model reads text only"),
    "redacted_thinking": "thinking that another server has encrypted cannot be read here",
}


class Block(StrictModel):
    """A piece of a message."""


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str


TextBlocks = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[
        list[Annotated[TextBlock, known_types("blocks", ("text",), _REASONS)]], Field(fail_fast=True), Tag("<list>")
    ],
    text_or_list(),
]


class ThinkingBlock(Block):
    """What the model said to itself."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Accepted; not checked.")


class ToolUseBlock(Block):
    """A call of the model's."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks | None = None
    is_error: bool | None = Field(None, description="The model is told so.")

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        text = text_of(self.content or "")
        turns.result(self.tool_use_id, f"Error: {text}" if self.is_error else text)


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")],
    by_type(),
    known_types("blocks of a user", ("text", "tool_result"), _REASONS),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    by_type(),
    known_types("blocks of an assistant", ("text", "thinking", "tool_use"), _REASONS),
]


def text_of(content: str | list[TextBlock]) -> str:
    """Return a content's text."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class UserMessage(StrictModel):
    """What the user said, and what calls returned."""

    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[UserBlock], Field(min_length=1, fail_fast=True), Tag("<list>")],
        text_or_list(),
    ]

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation; results stand before text, behind their calls."""
        if isinstance(self.content, str):
            turns.say("user", self.content)
            return
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                block.add_to(turns)
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        if texts:
            turns.say("user", text_of(texts))


class AssistantMessage(StrictModel):
    """What the model thought, said and called in one answer."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[AssistantBlock], Field(fail_fast=True), Tag("<list>")],
        text_or_list(),
    ]

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        blocks = self.content
        if isinstance(blocks, str):
            turns.say("assistant", blocks)
            return
        thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        if thought:
            turns.think(thought)
        turns.say("assistant", "".join(block.text for block in blocks if isinstance(block, TextBlock)))
        for block in blocks:
            if isinstance(block, ToolUseBlock):
                turns.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))


class SystemMessage(StrictModel):
    """Instructions."""

    role: Literal["system"]
    content: TextBlocks

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        turns.say("system", text_of(self.content))


Message = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    by_type(key="role"),
]


class AnsweredText(BaseModel):
    """What the model says."""

    type: Literal["text"]
    text: str


class AnsweredThinking(BaseModel):
    """What the model says to itself."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(BaseModel):
    """A tool that the model calls."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredToolUse
