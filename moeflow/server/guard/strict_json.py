"""JSON as its standard has it, and no more: what lenient parsers let through breaks things later.

Refused: invalid UTF-8, NaN and infinities, numbers too large for a double, duplicate keys, halves of surrogate pairs,
deep nesting, and excessive numbers of values, lists and objects: Python takes seconds
to build and to check a few megabytes of those, where it takes milliseconds for as much text. JSON has one kind of
number, so 1.0 and 1e0 are read as the integer that they are.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

MAX_DEPTH = 32  # the deepest sensible request nests five levels
MAX_VALUES = 200_000  # as many token ids may be in a request
MAX_CONTAINERS = 16_384  # lists and objects: messages, parts of messages, prompts, schemas of tools


class JsonError(ValueError):
    """The text is not JSON that we accept; the message gives the reason."""


def parse(body: bytes) -> Any:
    """Read one JSON document. Raises: JsonError."""
    _check_size(body)
    try:
        document = _decoder.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise JsonError(f"the body is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise JsonError(
            f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise JsonError(f"the body nests deeper than {MAX_DEPTH} levels") from None
    except JsonError:
        raise
    except ValueError:  # an integer of more digits than Python converts
        raise JsonError("the body holds a number with too many digits") from None
    _check(document, may_escape=b"\\u" in body)
    return document


def _check_size(body: bytes) -> None:
    """Count what a document holds, without building it. The count may be wrong for invalid JSON."""
    if _is_small(body):
        return  # even if all of its text were structure
    plain = _without_escapes(body)
    if plain.count(b'"') > 4 * MAX_VALUES:  # two for a key and two for its value
        raise _too_many()
    if not _is_small(_without_strings(plain)):
        raise _too_many()


def count_containers(document: bytes) -> int:
    """Return the number of lists and objects in a valid JSON document."""
    return _num_containers(_without_strings(_without_escapes(document)))


def _without_escapes(body: bytes) -> bytes:
    """Remove escaped backslashes and quotes: every quote that remains begins or ends a string."""
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


def _without_strings(plain: bytes) -> bytes:
    return b"".join(plain.split(b'"')[::2])


def _num_containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _is_small(text: bytes) -> bool:
    """Whether commas and brackets make no more values than allowed."""
    num_containers = _num_containers(text)
    return num_containers <= MAX_CONTAINERS and num_containers + text.count(b",") <= MAX_VALUES


def _too_many() -> JsonError:
    return JsonError(
        f"the body holds more than {MAX_VALUES} values, or more than {MAX_CONTAINERS} lists and objects; "
        "send several requests"
    )


def _check(document: Any, *, may_escape: bool) -> None:
    """Walk the containers; strings need a look only where `\\u` escapes can hide odd characters."""
    level: list[Any] = [[document]]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            inner += [value for value in values if isinstance(value, dict | list)]
            if may_escape:
                _check_texts(values)
            if may_escape and isinstance(container, dict):
                _check_texts(container)
        if not inner:
            return
        level = inner
    raise JsonError(f"the body nests deeper than {MAX_DEPTH} levels")


def _check_texts(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, str):
            _check_text(value)


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise JsonError("the body holds half of a surrogate pair (\\ud800 to \\udfff) in a string") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise JsonError(f"the body has the key {json.dumps(twice[:80])} twice in one object")
    return members


def _number(text: str) -> float | int:
    number = float(text)
    if not math.isfinite(number):
        raise JsonError("the body holds a number too large for a double")
    return int(number) if number.is_integer() else number


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"the body holds {name}, which is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_refuse_constant)
