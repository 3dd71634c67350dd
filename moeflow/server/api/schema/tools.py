"""Tools that a request offers, which of them are to be called, and calls in messages. In OpenAI's words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, Tag, model_validator

from moeflow.server.api.conversation.tool_choice import ToolChoice
from moeflow.server.api.schema.field_rules import Rule
from moeflow.server.api.schema.strict_model import StrictModel, one_of, refusal
from moeflow.server.api.schema.tagged import by_type
from moeflow.text.tool_syntax.tool import Tool

MAX_TOOLS = 512
NAMES_OF_TOOLS = "Their names must differ."
CHOICE_OF_TOOLS = Rule(
    "tool_choice",
    "tool_choice asks for a call, but there are no tools",
    lambda fields: fields["tool_choice"] in (None, "none", "auto") or bool(fields["tools"]),
    {
        "anyOf": [
            {"properties": {"tool_choice": {"enum": [None, "none", "auto"]}}},
            {"required": ["tools"], "properties": {"tools": {"type": "array", "minItems": 1}}},
        ]
    },
)
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionDefinition(StrictModel):
    """A function of the client's."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object; left out: no arguments.")
    strict: bool | None = Field(None, description="Arguments have to be as parameters describe them.")


class ToolDefinition(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise refusal("type", f"tools of type {kind[:80]!r} are not supported: the model calls functions only")
        return data

    def plain(self) -> Tool:
        """Return it as the engine knows it."""
        function = self.function
        return Tool(function.name, function.description, function.parameters, bool(function.strict))


class FunctionChoice(StrictModel):
    """A function by name."""

    name: FunctionName


class ToolName(StrictModel):
    """A tool by name."""

    type: Literal["function"]
    function: FunctionChoice


class AllowedTools(StrictModel):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(StrictModel):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoiceField = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[ToolName, Tag("<function>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed_tools>")],
    by_type("word"),
    one_of("none, auto, required, a tool by name, or allowed_tools"),
]


def _arguments_text(arguments: Any) -> Any:
    if arguments is None:
        return "{}"
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


CalledArguments = Annotated[
    str,
    one_of("JSON as a string, an object, or null for none"),
    BeforeValidator(_arguments_text, json_schema_input_type=str | dict[str, Any] | None),
    Field(description="An object, or its JSON. Other text is for chat templates that take text."),
]


class CalledFunction(StrictModel):
    """A function and its arguments."""

    name: str
    arguments: CalledArguments


class ToolCall(StrictModel):
    """A call in an earlier message."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return it as chat templates take it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


def tool_wish(tools: Sequence[ToolDefinition], choice: Any, *, is_parallel: bool) -> ToolChoice:
    """Return what a request says about tools. Raises: RequestError; see `ToolChoice`."""
    names, is_required = _wanted(choice)
    plain = [tool.plain() for tool in tools]
    return ToolChoice(plain, names=names, is_required=is_required, is_parallel=is_parallel, is_off=choice == "none")


def _wanted(choice: Any) -> tuple[set[str] | None, bool]:
    """Return the names of tools that may be called, None for all, and whether one has to be."""
    if isinstance(choice, ToolName):
        return {choice.function.name}, True
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        return {tool.function.name for tool in allowed.tools}, allowed.mode == "required"
    return None, choice == "required"


class AnsweredFunction(BaseModel):
    """A function that the model calls."""

    name: str
    arguments: str


class AnsweredCall(BaseModel):
    """A call in an answer."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class FunctionDelta(BaseModel):
    """A call's name first, then pieces of its arguments."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(BaseModel):
    """A delta of a call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta
