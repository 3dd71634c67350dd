"""Arguments that are written plainly, without the quotes and escapes of JSON, between markers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from moeflow.text.tool_syntax.events import Arguments, Event
from moeflow.text.tool_syntax.json_scanner import escaped, json_of
from moeflow.text.tool_syntax.reader import Reader, Steps
from moeflow.text.tool_syntax.value_set import ANY_VALUE, ValueSet

MAX_CHARS: Final = 1 << 20  # of a value that is no text, which is held back until it is whole


def key_of(key: str, *, is_first: bool) -> Arguments:
    """Return an argument's key as JSON, with the text before and after it."""
    return Arguments(("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")


def value_until(reader: Reader, markers: Sequence[str], values: ValueSet) -> Steps[bool]:
    """Yield a value as JSON, a text as it comes; return whether a marker ended it, which is taken.

    `values` are its allowed values.
    """
    if values.has_only_strings:
        yield Arguments('"')
        marker = yield from reader.text_until(markers, _in_string)
        if marker is not None:
            yield Arguments('"')
        return marker is not None
    found = yield from reader.whole_until(markers, MAX_CHARS)
    if found is None:
        return False
    yield Arguments(as_json(found[0], values))
    return True


def as_json(text: str, values: ValueSet = ANY_VALUE) -> str:
    """Return a text as JSON: its value, if the text is JSON and the value is one of these; or a string.

    Where any text is a value, quotes belong to the text.
    """
    meant = json_of(text, values)
    is_quoted = meant is not None and meant.startswith('"')
    return json.dumps(text, ensure_ascii=False) if meant is None or (is_quoted and values.is_text) else meant


def _in_string(text: str) -> Event:
    return Arguments(escaped(text))
