"""Calls in earlier messages of a conversation, as chat templates take them: with arguments as objects.

Arguments that are no object stay a text. A model may write such a text, and `max_tokens` may cut an object off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

PLACE: Final = "place"  # key of a call: its place in the request, for errors; templates do not see it
_KINDS: Final = {list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_HALF_CHARACTER: Final = re.compile(r"\\u[dD][89a-fA-F]")


class TextCall(NamedTuple):
    """A call with arguments that are no object."""

    place: str
    description: str


def with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as objects, where they are objects."""
    return _with_arguments(message, lambda arguments: _read(arguments)[0])


def without_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with an empty object for arguments that are a text."""
    return [_with_arguments(message, lambda found: {} if isinstance(found, str) else found) for message in messages]


def first_text_call(messages: Sequence[Mapping[str, Any]]) -> TextCall | None:
    """Return the first call with arguments that are no object."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            _, problem = _read(function.get("arguments"))
            if problem:
                place = call.get(PLACE) or f"messages[{i}].tool_calls[{j}]"
                return TextCall(place, f"the arguments of this call of {function['name'][:80]!r} are {problem}")
    return None


def _with_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    calls = [
        {key: value for key, value in call.items() if key != PLACE}
        | {"function": {**call["function"], "arguments": change(call["function"].get("arguments"))}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _read(arguments: Any) -> tuple[Any, str]:
    """Return arguments for a template, and the reason why they are no object: "" if they are one."""
    if arguments is None or isinstance(arguments, Mapping):
        return arguments or {}, ""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        value = json.loads(text, strict=False) if text.strip() else None
        if _HALF_CHARACTER.search(text):
            value = _with_whole_characters(value)
    except (ValueError, RecursionError) as error:
        return text, f"no JSON: {error}"
    if value is None:
        return {}, ""
    if not isinstance(value, dict):
        return text, f"JSON of type {_KINDS[type(value)]}"
    return value, ""


def _with_whole_characters(value: Any) -> Any:
    """Return a value of JSON with U+FFFD for halves of surrogate pairs, which no prompt can have."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
