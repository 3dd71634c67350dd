"""Cuts a property's schema out of a whole one, and keeps the meaning of its references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from moeflow.text.answer_form.keyword_kinds import JSON_VALUES, NAMED_SCHEMAS

_WHOLE: Final = "#/$defs/whole"


def property_schema(whole: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of one of the `properties` of a whole schema. An optional property of schema false has {}."""
    described = whole["properties"][name]
    if not isinstance(described, Mapping):
        return {}
    if not _has_reference(described):
        return dict(described)
    pointer = quote(name.replace("~", "~0").replace("/", "~1"))
    return {"$ref": f"{_WHOLE}/properties/{pointer}", "$defs": {"whole": _moved(whole)}}


def _has_reference(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(map(_has_reference, schema.values()))
    return isinstance(schema, list) and any(map(_has_reference, schema))


def _moved(schema: Any) -> Any:
    """Return a schema whose references to places of the root lead to where the root is now."""
    if isinstance(schema, list):
        return [_moved(one) for one in schema]
    return {key: _moved_value(key, value) for key, value in schema.items()} if isinstance(schema, Mapping) else schema


def _moved_value(key: str, value: Any) -> Any:
    if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return _WHOLE + value.removeprefix("#")
    if key in NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: _moved(one) for name, one in value.items()}
    return value if key in JSON_VALUES else _moved(value)
