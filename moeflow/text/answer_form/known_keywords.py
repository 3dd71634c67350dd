"""Says one schema without the keywords that llguidance refuses, where its other keywords mean exactly the same.

Generators of schemas write many keywords that restrict nothing, such as `propertyNames` of type string. Annotations
stay: llguidance ignores them. A keyword with no equal stays, too, and its schema is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_ANNOTATIONS: Final = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
_DRAFTS: Final = re.compile(
    r"http://json-schema\.org/draft-0[3-7]/schema#?|https://json-schema\.org/draft/20\d\d-\d\d/.*"
)
_STANDARD_FORMATS: Final = frozenset(  # all others are annotations
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex"),
    )
)
_WITHOUT_EFFECT: Final = (  # keywords with the value that restricts nothing
    ("uniqueItems", False),
    ("unevaluatedProperties", True),
    ("unevaluatedItems", True),
)
_DEPENDENT: Final = ("dependentRequired", "dependentSchemas", "dependencies")


def in_known_keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of the same meaning. Looks at this schema alone, not at those within it."""
    said = dict(schema)
    for keyword, say in _SAY.items():
        if keyword in said:
            say(said, keyword)
    return said


def _say_draft(schema: dict[str, Any], keyword: str) -> None:
    if not isinstance(schema[keyword], str) or not _DRAFTS.fullmatch(schema[keyword]):
        del schema[keyword]


def _say_format(schema: dict[str, Any], keyword: str) -> None:
    if isinstance(schema[keyword], str) and schema[keyword] not in _STANDARD_FORMATS:
        del schema[keyword]


def _say_without_effect(schema: dict[str, Any], keyword: str) -> None:
    if (keyword, schema[keyword]) in _WITHOUT_EFFECT:
        del schema[keyword]


def _say_not(schema: dict[str, Any], keyword: str) -> None:
    if schema[keyword] is False:
        del schema[keyword]
    elif _takes_all(schema[keyword]):
        _require(schema, keyword, [False])


def _say_names(schema: dict[str, Any], keyword: str) -> None:
    """Say `propertyNames` by `patternProperties` or `properties`, where no names are described otherwise."""
    names = schema[keyword]
    if isinstance(names, dict) and names.get("type") == "string":
        names = {name: value for name, value in names.items() if name != "type"}
    if _takes_all(names):
        del schema[keyword]
        return
    if not isinstance(names, dict) or schema.get("properties") or schema.get("patternProperties"):
        return
    others = schema.get("additionalProperties", True)
    match {name: value for name, value in names.items() if name not in _ANNOTATIONS}:
        case {"pattern": str(pattern), **rest} if not rest:
            named = {"patternProperties": {pattern: others}}
        case {"enum": list(choices), **rest} if not rest:
            named = {"properties": {name: others for name in choices if isinstance(name, str)}}
        case _:
            return
    del schema[keyword]
    schema |= {**named, "additionalProperties": False}


def _say_dependent(schema: dict[str, Any], keyword: str) -> None:
    """Say for each name: it is not there, or what depends on it holds."""
    if isinstance(schema[keyword], dict):
        parts = [
            {"anyOf": [{"properties": {name: False}}, {"required": held} if isinstance(held, list) else held]}
            for name, held in schema[keyword].items()
        ]
        _require(schema, keyword, parts)


def _require(schema: dict[str, Any], keyword: str, parts: list[Any]) -> None:
    """Put schemas that have to hold, too, in the place of a keyword."""
    others = schema.get("allOf", [])
    if isinstance(others, list):
        del schema[keyword]
        schema["allOf"] = [*others, *parts]


def _takes_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and _ANNOTATIONS.issuperset(schema))


_SAY: Final[Mapping[str, Callable[[dict[str, Any], str], None]]] = {
    "$schema": _say_draft,
    "format": _say_format,
    "not": _say_not,
    "propertyNames": _say_names,
    **dict.fromkeys((keyword for keyword, _ in _WITHOUT_EFFECT), _say_without_effect),
    **dict.fromkeys(_DEPENDENT, _say_dependent),
}
