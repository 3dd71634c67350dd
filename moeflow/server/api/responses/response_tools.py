"""Tools as requests to `/v1/responses` describe them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from moeflow.server.api.responses.hosted_kinds import HOSTED, HostedTool, tool_kinds
from moeflow.server.api.schema.answer_form import TextFormat
from moeflow.server.api.schema.strict_model import StrictModel, one_of
from moeflow.server.api.schema.tagged import by_type, known_types
from moeflow.server.api.schema.tools import MAX_TOOLS, FunctionName


class FunctionTool(StrictModel):
    """A function of the client's."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object; left out: no arguments.")
    strict: bool | None = Field(None, description="Arguments have to be as parameters describe them.")


class GrammarFormat(StrictModel):
    """A grammar that a tool's input follows."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = Field(description="Enforced, unless it is a Lark grammar with recursion.")


class FreeformTool(StrictModel):
    """A tool of the client's that takes a text."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: (
        Annotated[
            Annotated[TextFormat, Tag("<text>")] | Annotated[GrammarFormat, Tag("<grammar>")],
            by_type(),
            known_types("formats", ("text", "grammar")),
        ]
        | None
    ) = Field(None, description="Any text, unless set.")


NamespacedTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[FreeformTool, Tag("<custom>")],
    by_type(),
    known_types("tools in a namespace", ("function", "custom")),
]


class NamespaceTool(StrictModel):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[NamespacedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class LocalShellTool(StrictModel):
    """The client's shell."""

    type: Literal["local_shell"]


class ToolSearchTool(StrictModel):
    """A search for more tools. The model may call it if the client executes it."""

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object.")


_KINDS = tool_kinds(("function", "custom", "namespace", "local_shell", "tool_search"))
ToolDefinition = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[FreeformTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[LocalShellTool, Tag("<local_shell>")]
    | Annotated[ToolSearchTool, Tag("<tool_search>")]
    | Annotated[HostedTool, Tag(HOSTED)],
    _KINDS.discriminator(),
    _KINDS.known(),
]
ToolDefinitions = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedTool(StrictModel):
    """A tool by name."""

    type: Literal["function", "custom"]
    name: FunctionName
    namespace: FunctionName | None = Field(None, description="May be left out where the name is that of one tool.")


class KindOfTool(StrictModel):
    """A tool that is named by its type."""

    type: Literal["local_shell", "tool_search"]


_ALLOWED = tool_kinds(("function", "custom", "local_shell", "tool_search"))
AllowedTool = Annotated[
    Annotated[NamedTool, Tag("<function>")]
    | Annotated[NamedTool, Tag("<custom>")]
    | Annotated[KindOfTool, Tag("<local_shell>")]
    | Annotated[KindOfTool, Tag("<tool_search>")]
    | Annotated[HostedTool, Tag(HOSTED)],
    _ALLOWED.discriminator(),
    _ALLOWED.known(),
]


class ResponseAllowedTools(StrictModel):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<function>")]
    | Annotated[NamedTool, Tag("<custom>")]
    | Annotated[ResponseAllowedTools, Tag("<allowed_tools>")]
    | Annotated[HostedTool, Tag(HOSTED)],
    tool_kinds(("word", "function", "custom", "allowed_tools"), "word").discriminator(),
    one_of("none, auto, required, a tool by name, or allowed_tools"),
]


def dumped_tools(tools: ToolDefinitions) -> list[dict[str, Any]]:
    """Return tools as the request described them."""
    return [tool.model_dump(by_alias=True, exclude_unset=True) for tool in tools]
