"""Rules about several fields of a request. Each is both a check and the equivalent JSON Schema.

Declared once on a model (`StrictModel.rules`), so that the OpenAPI document cannot allow what the server refuses. A
field that is null counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_NULL = {"type": "null"}
_NOT_NULL = {"type": ["array", "boolean", "number", "object", "string"]}


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on several fields of one object."""

    field: str  # that an error names
    message: str
    holds: Callable[[Mapping[str, Any]], bool]  # takes all fields; absent ones are None
    schema: dict[str, Any]  # the same as JSON Schema, to be added to the object's own


def needs_true(field: str, other: str) -> Rule:
    """Return the rule for a field that may be given only where another one is true."""
    with_other = {"required": [other], "properties": {other: {"const": True}}}
    return Rule(
        field,
        f"{field} needs {other}: true",
        lambda fields: fields[field] is None or fields[other] is True,
        {"anyOf": [{"properties": {field: _NULL}}, with_other]},
    )


def exactly_one(field: str, other: str) -> Rule:
    """Return the rule that exactly one of two fields is given."""
    pairs = ((field, other), (other, field))
    return Rule(
        field,
        f"give either {field} or {other}",
        lambda fields: (fields[field] is None) != (fields[other] is None),
        {"anyOf": [{"required": [one], "properties": {one: _NOT_NULL, absent: _NULL}} for one, absent in pairs]},
    )


def together(field: str, other: str) -> Rule:
    """Return the rule for two fields that are given both or not at all."""
    return Rule(
        field,
        f"give both {field} and {other}, or neither",
        lambda fields: (fields[field] is None) == (fields[other] is None),
        {"dependentRequired": {field: [other], other: [field]}},
    )


def not_all(field: str, message: str, allowed: Mapping[str, tuple[Any, ...]]) -> Rule:
    """Return the rule that at least one field has one of its listed values."""
    return Rule(
        field,
        message,
        lambda fields: any(fields[name] in values for name, values in allowed.items()),
        {"anyOf": [{"properties": {name: {"enum": [*values]}}} for name, values in allowed.items()]},
    )
