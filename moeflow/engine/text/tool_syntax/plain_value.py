"""Arguments that are written plainly, without the quotes and escapes of JSON, between markers."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Final

from moeflow.engine.text.tool_syntax.events import Arguments, Event
from moeflow.engine.text.tool_syntax.json_values import escaped
from moeflow.engine.text.tool_syntax.reader import Reader, Steps
from moeflow.engine.text.tool_syntax.tool import types_of

MAX_CHARS: Final = 1 << 20  # of a value that is no text, which is held back until it is whole
_PYTHON: Final[dict[str, Any]] = {"True": True, "False": False, "None": None}  # as models write them, too


def key_of(key: str, *, is_first: bool) -> Arguments:
    """Return an argument's key as JSON has it, with what stands before and behind it."""
    return Arguments(("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")


def value_until(reader: Reader, markers: Sequence[str], types: Collection[str]) -> Steps[bool]:
    """Yield a value as JSON, a text as it comes; return whether a marker ended it, which is taken.

    `types` are those that it may have, by JSON Schema's names; none: any.
    """
    if set(types) == {"string"}:
        yield Arguments('"')
        marker = yield from reader.text_until(markers, _in_string)
        if marker is not None:
            yield Arguments('"')
        return marker is not None
    found = yield from reader.whole_until(markers, MAX_CHARS)
    if found is None:
        return False
    yield Arguments(as_json(found[0], types))
    return True


def as_json(text: str, types: Collection[str] = ()) -> str:
    """Return the JSON of what was meant: the value that a text is, or a string if only that may be."""
    stripped = text.strip()
    try:
        value = _PYTHON[stripped] if stripped in _PYTHON else json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = text
    if "string" in types and not types_of(value).intersection(types):
        value = text
    return json.dumps(value, ensure_ascii=False)


def _in_string(text: str) -> Event:
    return Arguments(escaped(text))


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
