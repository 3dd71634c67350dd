"""Blocks of `/v1/messages` that the model reads as text, and blocks that the server leaves out with a note."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, Tag, model_validator

from moeflow.server.api.schema import left_out
from moeflow.server.api.schema.images import UnreadPart
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.api.schema.tagged import by_type, known_types, text_or_list

# Traces of tools and states of Anthropic's servers, in conversations that began there.
_OTHERS = Literal[
    "redacted_thinking",
    "server_tool_use",
    "mcp_tool_use",
    "mcp_tool_result",
    "mcp_tool_listing",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "advisor_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "container_upload",
    "tool_addition",
    "tool_removal",
    "browser_state",
    "fallback",
]
_BILLING: Final = "x-anthropic-billing-header:"
LEFT_OUT: Final[Mapping[str, str]] = dict.fromkeys(get_args(_OTHERS), "left_out")  # tag of each type


class Block(StrictModel):
    """A piece of a message."""


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str


class ImageBlock(UnreadPart, Block):
    """An image."""

    type: Literal["image"]
    source: dict[str, Any]


class TextSource(StrictModel):
    """A document's text."""

    type: Literal["text"]
    data: str
    media_type: str | None = None


class ContentSource(StrictModel):
    """A document's text in pieces."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[
            list[
                Annotated[
                    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
                    by_type(),
                ]
            ],
            Tag("<list>"),
        ],
        text_or_list(),
    ]


class FileSource(BaseModel):
    """A document that is no text."""

    model_config = ConfigDict(extra="allow")

    type: Literal["base64", "url", "file"]


class DocumentBlock(UnreadPart, Block):
    """A document: its text, or a note that the model cannot see it."""

    kind: ClassVar[str] = "document"

    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, Tag("<text>")]
        | Annotated[ContentSource, Tag("<content>")]
        | Annotated[FileSource, Tag("<file>")],
        by_type(groups=dict.fromkeys(("base64", "url"), "file")),
    ]
    title: str | None = None
    context: str | None = None

    @property
    def is_unread(self) -> bool:
        """Whether some of it is no text."""
        source = self.source
        if isinstance(source, ContentSource):
            return any(isinstance(part, ImageBlock) for part in source.content)
        return isinstance(source, FileSource)

    @property
    def text(self) -> str:
        """The text that the model reads."""
        match self.source:
            case TextSource():
                text = self.source.data
            case ContentSource():
                text = text_of(self.source.content)
            case FileSource():
                text = super().text
        return "\n\n".join(filter(None, (self.title, self.context, text)))


class SearchResultBlock(Block):
    """What a search of the client's found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]

    @property
    def text(self) -> str:
        """The text that the model reads."""
        return "\n".join((self.title, self.source, text_of(self.content)))


class ToolReferenceBlock(Block):
    """A tool that a search of the client's found."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """The text that the model reads."""
        return self.tool_name


class LeftOutBlock(BaseModel):
    """A trace of a tool or a state of another server: the model does not read it."""

    model_config = ConfigDict(extra="allow")

    type: _OTHERS

    @model_validator(mode="after")
    def _note(self) -> Self:
        left_out.leave_out(f"messages ({self.type})")
        return self

    @property
    def text(self) -> None:
        """Nothing."""


class CompactionBlock(BaseModel):
    """A summary in place of earlier messages."""

    model_config = ConfigDict(extra="allow")

    type: Literal["compaction"]
    content: str | None = None

    @property
    def text(self) -> str | None:
        """The text that the model reads."""
        return self.content


TextBlocks = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[Annotated[TextBlock, known_types("blocks", ("text",))]], Field(fail_fast=True), Tag("<list>")],
    text_or_list(),
]


def text_of(content: str | list[Any]) -> str:
    """Return the text of a content: of its blocks, those left out aside."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if block.text is not None)


def system_text(content: str | list[TextBlock]) -> str:
    """Return the text of a request's system blocks without the note with which some clients begin each request.

    The note changes from request to request, so that no prompt would begin as the one before.
    """
    text = text_of(content)
    head, _, rest = text.partition("\n")
    if not head.startswith(_BILLING):
        return text
    left_out.leave_out(f"system ({_BILLING[:-1]})")
    return rest
