"""Rules about several fields of a request together, each both a check and the JSON Schema that says the same.

Declared once on a model (`StrictModel.rules`), so that the OpenAPI document cannot allow what the server refuses. A
field that is null counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_NULL = {"type": "null"}
_NOT_NULL = {"type": ["array", "boolean", "number", "object", "string"]}


class Rule(Protocol):
    """What the fields of one object must fulfil together."""

    @property
    def field(self) -> str:
        """The field that an error names."""
        ...

    @property
    def message(self) -> str:
        """What an error says."""
        ...

    def holds(self, fields: Mapping[str, Any]) -> bool:
        """Return whether the fields follow the rule; absent ones are None."""
        ...

    def schema(self) -> dict[str, Any]:
        """Return the rule as JSON Schema, to be added to the object's own."""
        ...


@dataclass(frozen=True, slots=True)
class NeedsTrue:
    """A field that may be given only where another one is true."""

    field: str
    other: str

    @property
    def message(self) -> str:
        """See `Rule`."""
        return f"{self.field} is only allowed together with {self.other}: true"

    def holds(self, fields: Mapping[str, Any]) -> bool:
        """See `Rule`."""
        return fields[self.field] is None or fields[self.other] is True

    def schema(self) -> dict[str, Any]:
        """See `Rule`."""
        with_other = {"required": [self.other], "properties": {self.other: {"const": True}}}
        return {"anyOf": [{"properties": {self.field: _NULL}}, with_other]}


@dataclass(frozen=True, slots=True)
class ExactlyOne:
    """Two fields of which one must be given, and only one."""

    field: str
    other: str

    @property
    def message(self) -> str:
        """See `Rule`."""
        return f"give either {self.field} or {self.other}"

    def holds(self, fields: Mapping[str, Any]) -> bool:
        """See `Rule`."""
        return (fields[self.field] is None) != (fields[self.other] is None)

    def schema(self) -> dict[str, Any]:
        """See `Rule`."""
        pairs = ((self.field, self.other), (self.other, self.field))
        return {
            "anyOf": [{"required": [given], "properties": {given: _NOT_NULL, absent: _NULL}} for given, absent in pairs]
        }


@dataclass(frozen=True, slots=True)
class Together:
    """Two fields that are given both or not at all."""

    field: str
    other: str

    @property
    def message(self) -> str:
        """See `Rule`."""
        return f"give both {self.field} and {self.other}, or neither"

    def holds(self, fields: Mapping[str, Any]) -> bool:
        """See `Rule`."""
        return (fields[self.field] is None) == (fields[self.other] is None)

    def schema(self) -> dict[str, Any]:
        """See `Rule`."""
        return {"dependentRequired": {self.field: [self.other], self.other: [self.field]}}


@dataclass(frozen=True, slots=True)
class NotAll:
    """Fields of which at least one must have one of the values that are named for it."""

    field: str
    message: str
    allowed: Mapping[str, tuple[Any, ...]]

    def holds(self, fields: Mapping[str, Any]) -> bool:
        """See `Rule`."""
        return any(fields[name] in values for name, values in self.allowed.items())

    def schema(self) -> dict[str, Any]:
        """See `Rule`."""
        return {"anyOf": [{"properties": {name: {"enum": [*values]}}} for name, values in self.allowed.items()]}
