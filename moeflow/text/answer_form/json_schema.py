"""Rewrites schemas so that llguidance enforces them exactly, and refuses keywords that it accepts but does not enforce.

llguidance accepts invalid dates (30 February) and too long host names, so such formats become patterns. They may be
narrower than the format, never wider. It allows escapes in additional names, which could spell a name of the schema. So
characters are written without escapes, unless names of the schema need them.
It also counts a repeated name twice, while JSON readers keep one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from moeflow.core.errors import RequestError
from moeflow.text.answer_form.keyword_kinds import JSON_VALUES, LITERALS, NAMED_SCHEMAS
from moeflow.text.answer_form.known_keywords import in_known_keywords

_ESCAPES: Final = '"\\bfnrt'  # behind a backslash
_ESCAPED: Final = frozenset(map(chr, range(32))) - frozenset("\b\f\n\r\t") | {"\x7f"}  # which take others

_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_OF_100: Final = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR: Final = f"(?:[0-9]{{2}}{_LEAP_OF_100}|{_LEAP_OF_100}00)"
_DAY_TO_28: Final = "(?:0[1-9]|1[0-9]|2[0-8])"
_DAY: Final = f"(?:(?:0[13578]|1[02])-(?:{_DAY_TO_28}|29|30|31)|(?:0[469]|11)-(?:{_DAY_TO_28}|29|30)|02-{_DAY_TO_28})"
_DATE: Final = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR: Final = "(?:[01][0-9]|2[0-3])"
_TIME: Final = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"  # no leap second
_ALNUM, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LABEL: Final = (  # 63 characters at most; no hyphens in third and fourth place, where they announce an encoding
    f"{_ALNUM}(?:{_ALNUM}|{_INNER}{_ALNUM}|{_INNER}{{2}}{_ALNUM}"
    f"|{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM}){_INNER}{{0,58}}{_ALNUM})?"
)
_FORMATS: Final[Mapping[str, dict[str, Any]]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "hostname": {"pattern": f"^{_LABEL}(?:\\.{_LABEL})*$", "maxLength": 253},
}


@dataclass(slots=True)
class _Found:
    """What decides which escapes answers may have."""

    needs_escapes: bool = False
    has_free_names: bool = False  # beside some that are named


def held_schema(schema: Mapping[str, Any], whitespace_pattern: str) -> dict[str, Any]:
    """Return a schema for llguidance, with such whitespace between the parts of JSON.

    Raises: RequestError for what answers could not be held to.
    """
    found = _Found()
    try:
        held = _held(schema, found)
    except RecursionError:
        raise RequestError("the schema nests too deeply") from None
    if found.needs_escapes and found.has_free_names:
        raise RequestError(
            "a schema with control characters in const, enum or names cannot be enforced where properties may have "
            "other names than those it lists: set additionalProperties to false, or leave the characters out"
        )
    escapes = _ESCAPES + ("u" if found.needs_escapes else "")
    return {**held, "x-guidance": {"whitespace_pattern": whitespace_pattern, "json_allowed_escapes": escapes}}


def _held(schema: Any, found: _Found) -> Any:
    if isinstance(schema, list):
        return [_held(one, found) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    schema = in_known_keywords(schema)
    held = {key: _held_value(key, value, found) for key, value in schema.items()}
    _check_count(schema)
    found.has_free_names |= not _is_closed(schema) and any(map(schema.get, ("properties", "patternProperties")))
    wanted, parts = schema.get("format"), schema.get("allOf", [])
    if isinstance(wanted, str) and wanted in _FORMATS and isinstance(parts, list):
        held["allOf"] = [*held.get("allOf", []), _FORMATS[wanted]]
        del held["format"]
    return held


def _held_value(key: str, value: Any, found: _Found) -> Any:
    if key in NAMED_SCHEMAS and isinstance(value, Mapping):
        found.needs_escapes |= any(map(_ESCAPED.intersection, value))
        return {name: _held(one, found) for name, one in value.items()}
    if key in LITERALS:
        found.needs_escapes |= any(map(_ESCAPED.intersection, _strings(value)))
    return value if key in JSON_VALUES else _held(value, found)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        yield from _strings([*value.values()])
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """Whether objects have listed properties only."""
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _check_count(schema: Mapping[str, Any]) -> None:
    """Raise RequestError for a number of properties that answers could reach by repeating one."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > num_required + 1 and not _is_closed(schema):
        raise RequestError(
            f"minProperties {least} cannot be enforced where properties may have any name, as one may come twice: "
            "list names in required, or list all and set additionalProperties to false"
        )
