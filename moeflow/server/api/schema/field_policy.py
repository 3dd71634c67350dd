"""How a request's fields that are not ours are treated: ignored, mapped to our fields, or refused with a reason.

`field_table.py` has the rows. Null asks for nothing, so every such field may be null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from moeflow.server.api.schema import left_out

VARIABLES: Final = "chat_template_kwargs"  # our field with a request's variables of the chat template
_NULL: Final[dict[str, Any]] = {"type": "null"}
_MAX_NAME: Final = 80  # characters of a name in an error


@dataclass(frozen=True, slots=True)
class Ignored:
    """A hint that changes no answer. Without a `kind`, any value is accepted."""

    reason: str
    kind: Literal["number", "boolean"] | None = None  # as in JSON Schema


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer, and that this server cannot honour."""

    reason: str
    harmless: tuple[Any, ...] = ()  # values that ask for nothing


@dataclass(frozen=True, slots=True)
class Mapped:
    """Another name of our field."""

    to: str


@dataclass(frozen=True, slots=True)
class Converted:
    """A field that our fields replace with other values."""

    to: str  # for people
    convert: Callable[[Any], dict[str, Any]]  # returns our fields; raises ValueError
    schema: Mapping[str, Any]  # JSON Schema of the values that it converts


@dataclass(frozen=True, slots=True)
class FieldParts:
    """An object whose members have rows of their own."""

    rows: Mapping[str, Policy]


@dataclass(frozen=True, slots=True)
class Unset:
    """Values of our own field that other APIs use for "not set"."""

    values: tuple[Any, ...]

    def drops(self, value: Any) -> bool:
        """Return whether a value of the field means that it is not set."""
        return _is_in(value, self.values)


Policy = Ignored | Refused | Mapped | Converted | FieldParts | Unset


def ours(name: str, policy: Policy, value: Any) -> dict[str, Any]:
    """Return our fields that a field stands for. Raises: ValueError with the reason of a refusal."""
    match policy:
        case _ if value is None:
            return {}
        case Mapped():
            return {policy.to: value}
        case Converted():
            return policy.convert(value)
        case FieldParts():
            return _ours_of_parts(name, policy.rows, value)
        case Ignored() if policy.kind is not None and not _is_a(value, policy.kind):
            raise ValueError(f"{name} must be a {policy.kind}. This server ignores it: {policy.reason}")
        case Refused() if not _is_in(value, policy.harmless):
            raise ValueError(f"{name} is not supported: {policy.reason}")
    return {}


def schema_of(name: str, policy: Policy, properties: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON Schema of a field, given those of our fields; None: only null is documented."""
    match policy:
        case Ignored():
            kind = {} if policy.kind is None else {"type": [policy.kind, "null"]}
            return {**kind, "description": f"Ignored: {policy.reason}."}
        case Mapped():
            schema = properties.get(policy.to, {})
            return {**schema, "description": f"Another name of {policy.to}."}
        case Converted():
            return {"anyOf": [dict(policy.schema), _NULL], "description": f"As {policy.to}."}
        case Unset():
            return {**properties[name], "anyOf": [_shape(properties[name]), {"enum": [*policy.values]}]}
        case FieldParts():
            members = {part: schema_of(part, row, properties) for part, row in policy.rows.items()}
            known = {part: schema for part, schema in members.items() if schema is not None}
            fields = {"type": "object", "properties": known, "additionalProperties": _NULL}
            return {"anyOf": [fields, _NULL], "description": "Its members, as fields of the request."}
    return None


def with_defaults(given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields and the others that they leave out. Variables of the chat template are fields, too."""
    merged = dict(given)
    for name, value in others.items():
        mine = merged.get(name)
        if mine is None:
            merged[name] = value
        elif name == VARIABLES and isinstance(mine, dict):
            merged[name] = with_defaults(mine, value)
    return merged


def _ours_of_parts(name: str, rows: Mapping[str, Policy], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object")
    fields: dict[str, Any] = {}
    for part, given in value.items():
        if part in rows:
            fields = with_defaults(fields, ours(f"{name}.{part}", rows[part], given))
        elif given is not None and not left_out.ignores_unknown_fields():
            raise ValueError(f"unknown field {part[:_MAX_NAME]!r} in {name}: known are {', '.join(rows)}")
        elif given is not None:
            left_out.leave_out(f"{name}.{part}")
    return fields


def _is_in(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether a value is among others; true is not 1 here."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def _is_a(value: Any, kind: str) -> bool:
    is_boolean = isinstance(value, bool)
    return is_boolean if kind == "boolean" else isinstance(value, int | float) and not is_boolean


def _shape(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in ("description", "title", "default")}
