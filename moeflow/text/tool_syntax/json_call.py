"""A call written as one JSON object: {"name": ..., "arguments": {...}}. Its keys may come in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moeflow.text.tool_syntax.events import Arguments, CallBegun
from moeflow.text.tool_syntax.json_values import json_pieces, json_value
from moeflow.text.tool_syntax.reader import Reader, Steps

MAX_HEAD_CHARS: Final = 64 * 1024  # text before a call is held back until it is certain
_ARGUMENTS: Final = ("arguments", "parameters")


def json_call(reader: Reader, is_known: Callable[[str], bool] = bool) -> Steps[bool]:
    """Yield a call as it comes; return whether there is one. If not, nothing was yielded.

    An interrupted call, or one with invalid JSON, still counts: it has begun. `is_known` judges names.
    """
    yield from reader.skip_space()
    if not (yield from reader.takes("{")):
        return False
    name, held, has_begun = "", "{}", False
    while True:
        key = yield from _key(reader)
        if key == "name" and not name:
            found = yield from json_value(reader, MAX_HEAD_CHARS)
            if found is None or not isinstance(found[1], str) or not is_known(found[1]):
                return False
            name = found[1]
        elif key in _ARGUMENTS and name and not has_begun:
            has_begun = True
            yield CallBegun(name)
            if not (yield from _arguments(reader)):
                return True
        elif key is not None:
            found = yield from json_value(reader, MAX_HEAD_CHARS)
            if found is None:
                return has_begun
            held = _plain(*found) if key in _ARGUMENTS else held
        else:
            return has_begun
        yield from reader.skip_space()
        if (yield from reader.takes("}")):
            break
        if not (yield from reader.takes(",")):
            return has_begun
    if name and not has_begun:
        yield CallBegun(name)
        yield Arguments(held)
    return bool(name)


def _key(reader: Reader) -> Steps[str | None]:
    """Return a key, and take the colon behind it; None if there is none."""
    yield from reader.skip_space()
    found = yield from json_value(reader, MAX_HEAD_CHARS)
    yield from reader.skip_space()
    if found is None or not isinstance(found[1], str) or not (yield from reader.takes(":")):
        return None
    yield from reader.skip_space()
    return found[1]


def _arguments(reader: Reader) -> Steps[bool]:
    """Yield arguments as they come. Some models write null for none, or put the object into a string."""
    char = yield from reader.char()
    if char not in ('"', "n"):
        return (yield from json_pieces(reader, Arguments))
    found = yield from json_value(reader, MAX_HEAD_CHARS)
    if found is not None:
        yield Arguments(_plain(*found))
    return found is not None


def _plain(text: str, value: object) -> str:
    return "{}" if value is None else value if isinstance(value, str) else text
