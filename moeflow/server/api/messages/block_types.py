"""Messages of `/v1/messages` and the blocks that they are made of, in Anthropic's words."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, Field, Tag, model_validator

from moeflow.server.api.conversation.turns import Turns
from moeflow.server.api.messages.shown_blocks import (
    LEFT_OUT,
    Block,
    CompactionBlock,
    DocumentBlock,
    ImageBlock,
    LeftOutBlock,
    SearchResultBlock,
    TextBlock,
    ToolReferenceBlock,
    text_of,
)
from moeflow.server.api.schema.images import check_parts
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.api.schema.tagged import by_type, known_types, text_or_list

_OF_USERS: Final = ("text", "image", "document", "search_result", "tool_result")
_OF_RESULTS: Final = ("text", "image", "document", "search_result", "tool_reference")
_OF_ASSISTANTS: Final = ("text", "thinking", "tool_use", "compaction")


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


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")]
    | Annotated[LeftOutBlock, Tag("<left_out>")],
    by_type(groups=LEFT_OUT),
    known_types("blocks of a result", _OF_RESULTS, also=LEFT_OUT),
]


class ToolResultBlock(Block):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[list[ResultBlock], Field(fail_fast=True), Tag("<list>")],
            text_or_list(),
        ]
        | None
    ) = None
    is_error: bool | None = Field(None, description="The model sees a note.")

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        check_parts("content", self.content, is_result=True)
        return self

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        text = text_of(self.content or "")
        turns.result(self.tool_use_id, f"Error: {text}" if self.is_error else text)


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[LeftOutBlock, Tag("<left_out>")],
    by_type(groups=LEFT_OUT),
    known_types("blocks of a user", _OF_USERS, also=LEFT_OUT),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[CompactionBlock, Tag("<compaction>")]
    | Annotated[LeftOutBlock, Tag("<left_out>")],
    by_type(groups=LEFT_OUT),
    known_types("blocks of an assistant", _OF_ASSISTANTS, also=LEFT_OUT),
]
SystemBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[LeftOutBlock, Tag("<left_out>")],
    by_type(groups=LEFT_OUT),
    known_types("blocks of the system", ("text",), also=LEFT_OUT),
]


class UserMessage(StrictModel):
    """What the user said, and what calls returned."""

    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[UserBlock], Field(min_length=1, fail_fast=True), Tag("<list>")],
        text_or_list(),
    ]

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        check_parts("content", self.content, is_result=False)
        return self

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation; results stand before text, behind their calls."""
        if isinstance(self.content, str):
            turns.say("user", self.content)
            return
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                block.add_to(turns)
        said = [block for block in self.content if not isinstance(block, ToolResultBlock | LeftOutBlock)]
        if said:
            turns.say("user", text_of(said))


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
        said = [block.text or "" for block in blocks if isinstance(block, TextBlock | CompactionBlock)]
        turns.say("assistant", "".join(said))
        for block in blocks:
            if isinstance(block, ToolUseBlock):
                turns.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))


class SystemMessage(StrictModel):
    """Instructions."""

    role: Literal["system"]
    content: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[list[SystemBlock], Field(fail_fast=True), Tag("<list>")],
            text_or_list(),
        ]
        | None
    ) = None

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        text = text_of(self.content or "")
        if text:
            turns.say("system", text)


Message = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    by_type(key="role"),
]


class AssistantText(BaseModel):
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


AnsweredBlock = AssistantText | AnsweredThinking | AnsweredToolUse
