"""The values that a schema allows, as far as its types and literals say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

TYPES: Final = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


@dataclass(frozen=True, slots=True)
class ValueSet:
    """All values of some types, and single values of other types.

    Types have JSON Schema's names. Here "number" means a number with a fraction, so that no value has two types.
    """

    types: frozenset[str] = frozenset()
    literals: Mapping[str, Any] = field(default_factory=dict)  # by their JSON
    text_rules: frozenset[str] = frozenset()  # keywords that narrow the strings further

    @classmethod
    def of_types(cls, names: Iterable[Any]) -> ValueSet:
        """Return the values of the types of these names. An unknown name stands for any type."""
        types: set[str] = set()
        for name in names:
            types |= {name} if isinstance(name, str) and name in TYPES else TYPES
            if name == "number":
                types.add("integer")
        return cls(frozenset(types))

    @classmethod
    def of_literals(cls, values: Iterable[Any]) -> ValueSet:
        """Return these values alone."""
        return cls(frozenset(), {_json(value): value for value in values})

    def __contains__(self, value: Any) -> bool:
        return type_of(value) in self.types or (bool(self.literals) and _json(value) in self.literals)

    @classmethod
    def union(cls, sets: Iterable[ValueSet]) -> ValueSet:
        """Return the values of all sets."""
        types: set[str] = set()
        literals: dict[str, Any] = {}
        text_rules: set[str] = set()
        for one in sets:
            types |= one.types
            literals.update(one.literals)
            text_rules |= one.text_rules
        return cls(frozenset(types), literals, frozenset(text_rules))

    def __and__(self, other: ValueSet) -> ValueSet:
        literals = {text: value for text, value in self.literals.items() if value in other}
        literals |= {text: value for text, value in other.literals.items() if value in self}
        return ValueSet(self.types & other.types, literals, self.text_rules | other.text_rules)

    @property
    def all_types(self) -> frozenset[str]:
        """The types of all values."""
        return self.types.union(map(type_of, self.literals.values()))

    @property
    def has_only_strings(self) -> bool:
        """Whether all values are strings."""
        return self.all_types <= {"string"}

    @property
    def is_text(self) -> bool:
        """Whether any text is a value as it stands, without the quotes of JSON; `null` may be null.

        A string with rules needs the quotes where it may be null, as only JSON keeps to the rules.
        """
        is_nullable = "null" in self.all_types
        has_strings = "string" in self.types and self.all_types <= {"string", "null"}
        return has_strings and not (is_nullable and self.text_rules)


ANY_VALUE: Final = ValueSet(TYPES)


def type_of(value: Any) -> str:
    """Return JSON Schema's name of a value's type; an integer is no number here."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case _:
            return "array" if isinstance(value, list) else "object"


def _json(value: Any) -> str:
    """Return the JSON that all equal values have."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, sort_keys=True)
