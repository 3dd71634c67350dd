"""JSON as its standard has it, and no more: what lenient parsers let through breaks things later.

Refused: bytes that are not UTF-8, NaN and infinities, numbers too large for a double, duplicate keys, NUL
characters, halves of surrogate pairs, deep nesting.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 32  # the deepest sensible request nests five levels


class JsonError(ValueError):
    """The text is not JSON that we accept; the message says why."""


def parse(body: bytes) -> Any:
    """Read one JSON document.

    Raises: JsonError.
    """
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


def _check(document: Any, *, may_escape: bool) -> None:
    """Walk the containers; strings need a look only where `\\u` escapes can hide odd characters."""
    level = [document]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
                inner += item.keys() if may_escape else ()
            elif isinstance(item, list):
                inner += item
            elif may_escape and isinstance(item, str):
                _check_text(item)
        if not inner:
            return
        level = inner
    raise JsonError(f"the body nests deeper than {MAX_DEPTH} levels")


def _check_text(text: str) -> None:
    if "\0" in text:
        raise JsonError("the body holds a NUL character (\\u0000) in a string")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise JsonError("the body holds half of a surrogate pair (\\ud800 to \\udfff) in a string") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f"the body has the key {json.dumps(twice[:80])} twice in one object")
    return members


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonError("the body holds a number too large for a double")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"the body holds {name}, which is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_refuse_constant)
