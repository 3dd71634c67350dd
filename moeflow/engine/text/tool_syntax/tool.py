"""A tool that a request offers to the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client's, as JSON Schema describes its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # None: not described
    is_strict: bool = False  # arguments have to be as described

    def as_json(self) -> dict[str, Any]:
        """Return it as chat templates take it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        return {"type": "function", "function": function | {"parameters": self.schema}}

    @property
    def schema(self) -> dict[str, Any]:
        """What arguments have to be: an object, at least."""
        return dict(self.parameters) if self.parameters else {"type": "object", "properties": {}}

    def types(self, key: str) -> frozenset[str]:
        """Return JSON Schema's names of the types that an argument may have; none: that is not described."""
        properties = self.schema.get("properties")
        described = properties.get(key) if isinstance(properties, dict) else None
        if not isinstance(described, dict):
            return frozenset()
        if isinstance(choices := described.get("enum"), list):
            return frozenset().union(*map(types_of, choices))
        named = described.get("type")
        return frozenset(map(str, named if isinstance(named, list) else () if named is None else (named,)))


def types_of(value: Any) -> frozenset[str]:
    """Return JSON Schema's names of a value's type."""
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("integer", "number") if value.is_integer() else ("number",))
        case str():
            return frozenset(("string",))
        case _:
            return frozenset(("array",) if isinstance(value, list) else ("object",))


class Tools:
    """The tools of a request, by name."""

    def __init__(self, tools: tuple[Tool, ...] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def types(self, name: str, key: str) -> frozenset[str]:
        """See `Tool.types`; none of a tool that is not known."""
        tool = self._tools.get(name)
        return frozenset() if tool is None else tool.types(key)
