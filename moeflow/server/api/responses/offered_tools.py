"""The tools of one request as the model sees them: functions with flat names. Calls get their own kinds and names back.

A tool in a namespace is a function `NAMESPACE__NAME`. A custom tool is a function with one argument, `input`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from moeflow.core.errors import RequestError
from moeflow.server.api.conversation.tool_choice import ToolChoice
from moeflow.server.api.responses.hosted_kinds import HostedTool
from moeflow.server.api.responses.response_tools import (
    AllowedTool,
    FreeformTool,
    FunctionTool,
    GrammarFormat,
    KindOfTool,
    LocalShellTool,
    NamedTool,
    NamespaceTool,
    ResponseAllowedTools,
    ResponseToolChoice,
    ToolDefinition,
    ToolSearchTool,
)
from moeflow.server.api.schema.left_out import leave_out
from moeflow.text.answer_form.lark_pattern import enforceable, pattern_of
from moeflow.text.tool_syntax.tool import Tool

CallKind = Literal["function_call", "custom_tool_call", "local_shell_call", "tool_search_call"]
INPUT: Final = "input"  # the argument of a custom tool
LOCAL_SHELL: Final = "local_shell"
TOOL_SEARCH: Final = "tool_search"
_SEPARATOR: Final = "__"
_MAX_NAME: Final = 128  # characters
_DIGEST: Final = 16  # characters that make a shortened name unique
_SHELL_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
}


@dataclass(frozen=True, slots=True)
class Called:
    """The form of the calls of a tool, as the client gets them."""

    kind: CallKind
    name: str
    namespace: str | None = None


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name that the model sees."""
    if not namespace:
        return name
    flat = f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"
    if len(flat) <= _MAX_NAME:
        return flat
    digest = hashlib.sha256(flat.encode()).hexdigest()[:_DIGEST]
    return f"{flat[: _MAX_NAME - len(digest) - 1]}_{digest}"


def flat_names(tools: Sequence[ToolDefinition]) -> list[str]:
    """Return the names under which the model sees tools."""
    offered = OfferedTools()
    offered.add_found(tools, "tools")
    return offered.names


class OfferedTools:
    """The tools of one request."""

    def __init__(self) -> None:
        self._tools: list[Tool] = []
        self._called: dict[str, Called] = {}

    def add(self, tools: Sequence[ToolDefinition]) -> None:
        """Add the tools of the request itself. Notes the parts that are left out.

        Raises: RequestError if two tools have the same name.
        """
        for index, tool in enumerate(tools):
            self._add(tool, f"tools[{index}]", is_again=False)

    def add_found(self, tools: Sequence[ToolDefinition], place: str) -> None:
        """Add tools that come with the conversation, unless they are there."""
        for tool in tools:
            self._add(tool, place, is_again=True)

    @property
    def names(self) -> list[str]:
        """The names that the model sees."""
        return [tool.name for tool in self._tools]

    def called(self, name: str) -> Called:
        """Return the form of a call, by the name that the model wrote."""
        return self._called.get(name) or Called("function_call", name)

    def wish(self, choice: ResponseToolChoice | None, *, is_parallel: bool) -> ToolChoice:
        """Return the tools and the choice among them. Raises: RequestError; see `ToolChoice`."""
        names: set[str] | None = None
        is_required, is_off = choice == "required", choice == "none"
        match choice:
            case ResponseAllowedTools():
                names = {name for tool in choice.tools if (name := self._chosen(tool)) is not None}
                is_required, is_off = choice.mode == "required", not names
            case NamedTool() | HostedTool():
                name = self._chosen(choice)
                names, is_required = (None, False) if name is None else ({name}, True)
        if is_required and not self._tools:
            leave_out("tool_choice")
        return ToolChoice(
            self._tools,
            names=names,
            is_required=is_required and bool(self._tools),
            is_parallel=is_parallel,
            is_off=is_off,
        )

    def _chosen(self, tool: AllowedTool) -> str | None:
        """Return the flat name of a tool that a choice names; None, with a note, for one that is left out."""
        match tool:
            case NamedTool(namespace=None) if tool.name not in self._called:
                flat = [flat for flat, called in self._called.items() if called.name == tool.name]
                return flat[0] if len(flat) == 1 else tool.name
            case NamedTool():
                return flat_name(tool.namespace, tool.name)
            case KindOfTool():
                return tool.type
        leave_out(f"tool_choice ({tool.type})")
        return None

    def _add(self, tool: ToolDefinition, place: str, *, is_again: bool) -> None:
        match tool:
            case FunctionTool() | FreeformTool():
                self._add_one(None, tool, None, place, is_again=is_again)
            case NamespaceTool():
                about = tool.description
                for member in tool.tools:
                    self._add_one(tool.name, member, about, f"{place}.{member.name}", is_again=is_again)
                    about = None
            case LocalShellTool():
                shell = Tool(LOCAL_SHELL, "Runs a command in the user's shell.", _SHELL_PARAMETERS)
                self._offer(shell, Called("local_shell_call", LOCAL_SHELL), is_again=is_again)
            case ToolSearchTool(execution="client"):
                search = Tool(TOOL_SEARCH, tool.description, tool.parameters)
                self._offer(search, Called("tool_search_call", TOOL_SEARCH), is_again=is_again)
            case _:
                leave_out(f"{place} ({tool.type})")

    def _add_one(
        self,
        namespace: str | None,
        tool: FunctionTool | FreeformTool,
        about: str | None,
        place: str,
        *,
        is_again: bool,
    ) -> None:
        """Add a tool; `about` describes its namespace."""
        described = [tool.description] if tool.description else []
        described += [f"About all tools of {namespace}: {about}"] if about else []
        name = flat_name(namespace, tool.name)
        if isinstance(tool, FunctionTool):
            plain = Tool(name, "\n\n".join(described) or None, tool.parameters, bool(tool.strict))
            self._offer(plain, Called("function_call", tool.name, namespace), is_again=is_again)
        else:
            plain = _freeform(name, described, tool.format if isinstance(tool.format, GrammarFormat) else None, place)
            self._offer(plain, Called("custom_tool_call", tool.name, namespace), is_again=is_again)

    def _offer(self, tool: Tool, called: Called, *, is_again: bool) -> None:
        """Add a function. Raises: RequestError if another tool has its name."""
        known = self._called.get(tool.name)
        if known is None:
            self._tools.append(tool)
            self._called[tool.name] = called
        elif not is_again:
            raise RequestError(f"two tools have the same name, {tool.name!r}", param="tools")


def _freeform(name: str, described: Sequence[str], grammar: GrammarFormat | None, place: str) -> Tool:
    """Return a custom tool as a function whose input follows the grammar."""
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    if grammar is None:
        return Tool(name, "\n\n".join(described) or None, parameters)
    words = "\n\n".join([*described, f"{INPUT} follows this {grammar.syntax} grammar:\n{grammar.definition}"])
    pattern = enforceable(grammar.definition) if grammar.syntax == "regex" else pattern_of(grammar.definition)
    if pattern is None:
        leave_out(f"{place}.format (grammar not enforced)")
        return Tool(name, words, parameters)
    return Tool(name, words, parameters, is_strict=True, patterns={INPUT: pattern})
