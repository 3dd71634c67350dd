"""Finds what the schema of a tool's arguments allows at a place: at the arguments, or at a value in them.

The reader of calls and the grammar of strict tools both ask here. A schema is a client's text: it may be malformed,
refer to itself, or take too long to follow. There anything is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final
from urllib.parse import unquote

from moeflow.text.tool_syntax.value_set import ANY_VALUE, TYPES, ValueSet

TEXT_RULES: Final = ("pattern", "format", "minLength", "maxLength", "not", "if")
MAX_DEPTH: Final = 32  # of references and alternatives at one place
MAX_STEPS: Final = 20_000  # through the parts and literals of one schema
_STEP_CHARACTERS: Final = 1000  # of a literal or a reference: reading them takes as long as a step
_EITHER: Final = ("anyOf", "oneOf")


class SchemaPlace:
    """One place in a schema. A place is made once and kept."""

    def __init__(self, schema: Any, walk: SchemaWalk) -> None:
        self._schema = schema
        self._walk = walk
        self._properties: dict[str, SchemaPlace] = {}

    @classmethod
    def of(cls, schema: Any) -> SchemaPlace:
        """Return the place of a whole schema."""
        return cls(schema, SchemaWalk(schema))

    @cached_property
    def values(self) -> ValueSet:
        """The values that may stand here. Of overlapping `oneOf`, and of limits such as `minimum`, it knows nothing."""
        return self._walk.values(self._schema)

    @property
    def referred(self) -> Mapping[str, Any]:
        """The schema here, at the end of a chain of references; empty, where the chain has no end."""
        return self._walk.referred(self._schema)

    @cached_property
    def item(self) -> SchemaPlace:
        """The place of each item, if a list stands here."""
        if not isinstance(self._schema, Mapping):
            return self
        return SchemaPlace(self._walk.inner(self._schema, None), self._walk)

    def property(self, key: str) -> SchemaPlace:
        """Return the place of a property, if an object stands here."""
        if not isinstance(self._schema, Mapping):
            return self
        if key not in self._properties:
            self._properties[key] = SchemaPlace(self._walk.inner(self._schema, key), self._walk)
        return self._properties[key]


class SchemaWalk:
    """Follows references and alternatives of one schema, for a limited number of steps."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_steps = 0

    def values(self, schema: Any, depth: int = 0) -> ValueSet:
        """Return the values that a part of the schema allows."""
        if not isinstance(schema, Mapping):
            return ValueSet() if schema is False else ANY_VALUE
        choices, named = schema.get("enum"), schema.get("type")
        if not self._may_follow(depth, 1 + _num_listed(choices) + _num_listed(named)):
            return ANY_VALUE
        found = ValueSet(TYPES, {}, frozenset(rule for rule in TEXT_RULES if rule in schema))
        if named is not None:
            found &= ValueSet.of_types(named if isinstance(named, list) else [named])
        if isinstance(choices, list):
            found &= self._literals(choices)
        if "const" in schema:
            found &= self._literals([schema["const"]])
        for every in self._every(schema):
            found &= self.values(every, depth + 1)
        for options in _either(schema):
            found &= ValueSet.union(self.values(option, depth + 1) for option in options)
        return found if "string" in found.types else ValueSet(found.types, found.literals)

    def inner(self, schema: Any, key: str | None, depth: int = 0) -> Any:
        """Return the schema of a property of this name, or of items (None)."""
        if not isinstance(schema, Mapping) or not self._may_follow(depth):
            return True
        parts = [_own_inner(schema, key)]
        parts += [self.inner(every, key, depth + 1) for every in self._every(schema)]
        kind = "array" if key is None else "object"
        for options in _either(schema):
            fitting = [option for option in options if kind in self.values(option, depth + 1).all_types]
            parts.append({"anyOf": [self.inner(option, key, depth + 1) for option in fitting] or [True]})
        return parts[0] if len(parts) == 1 else {"allOf": parts}

    def referred(self, schema: Any) -> Mapping[str, Any]:
        """Return the schema that a chain of references leads to; an empty one, where the chain has no end."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping):
                break
            if not isinstance(reference := schema.get("$ref"), str):
                return schema
            schema = self._target(reference)
        return {}

    def _literals(self, values: list[Any]) -> ValueSet:
        found = ValueSet.of_literals(values)
        self._num_steps += sum(map(len, found.literals)) // _STEP_CHARACTERS
        return found

    def _every(self, schema: Mapping[str, Any]) -> list[Any]:
        """Return the schemas that hold beside this one."""
        parts, reference = schema.get("allOf"), schema.get("$ref")
        referred = [self._target(reference)] if isinstance(reference, str) else []
        return [*referred, *(parts if isinstance(parts, list) else ())]

    def _target(self, reference: str) -> Any:
        """Return the schema at a pointer such as #/$defs/name; any, if there is none."""
        if not reference.startswith("#"):
            return True
        self._num_steps += len(reference) // _STEP_CHARACTERS
        found = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            elif isinstance(found, Mapping) and step in found:
                found = found[step]
            else:
                return True
        return found if reference in ("#", "#/") or reference.startswith("#/") else True

    def _may_follow(self, depth: int, num_steps: int = 1) -> bool:
        self._num_steps += num_steps
        return depth <= MAX_DEPTH and self._num_steps <= MAX_STEPS


def _num_listed(values: Any) -> int:
    return len(values) if isinstance(values, list) else 0


def _either(schema: Mapping[str, Any]) -> list[list[Any]]:
    """Return the lists of alternatives."""
    return [options for name in _EITHER if isinstance(options := schema.get(name), list) and options]


def _own_inner(schema: Mapping[str, Any], key: str | None) -> Any:
    """Return what a schema itself says of a property, or of items; any, where patterns or places decide."""
    if key is None:
        items = schema.get("items", True)
        return True if "prefixItems" in schema or isinstance(items, list) else items
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return True if schema.get("patternProperties") else schema.get("additionalProperties") or True
