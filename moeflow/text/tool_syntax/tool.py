"""A tool that a request offers to the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moeflow.text.tool_syntax.schema_place import SchemaPlace


@dataclass(frozen=True)
class Tool:
    """A function of the client's, as JSON Schema describes its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # None: not described
    is_strict: bool = False  # arguments have to be as described
    patterns: Mapping[str, str] = field(default_factory=dict)  # of whole strings, by argument; the model sees none

    def as_json(self) -> dict[str, Any]:
        """Return it as chat templates take it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        return {"type": "function", "function": function | {"parameters": self.schema}}

    @property
    def schema(self) -> dict[str, Any]:
        """What arguments have to be: an object, at least."""
        return dict(self.parameters) if self.parameters else {"type": "object", "properties": {}}

    @cached_property
    def arguments(self) -> SchemaPlace:
        """The place of the arguments in their schema."""
        return SchemaPlace.of(self.schema)


class Tools:
    """The tools of a request, by name."""

    def __init__(self, tools: tuple[Tool, ...] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def arguments(self, name: str) -> SchemaPlace:
        """Return the place of a tool's arguments in their schema; of an unknown tool, anything is allowed."""
        tool = self._tools.get(name)
        return SchemaPlace.of(True) if tool is None else tool.arguments
