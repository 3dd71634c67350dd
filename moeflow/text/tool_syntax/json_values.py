"""Reads JSON values from a text that is not all there yet. Strings may hold raw control characters, as models write
them; they come out escaped.
"""

from __future__ import annotations

import json
from typing import Any

from moeflow.text.tool_syntax.json_scanner import JsonScanner
from moeflow.text.tool_syntax.reader import Reader, Steps, Wrap


def json_pieces(reader: Reader, wrap: Wrap) -> Steps[bool]:
    """Yield the text of one value as it comes; return whether it is a whole one.

    It is not if the text ends in it or is invalid JSON. The pieces before that have been yielded.
    """
    scanner = JsonScanner()
    while True:
        text, is_end = reader.unread()
        used, piece = scanner.take(text)
        reader.skip(used)
        if is_end:
            piece += scanner.end()
        if piece:
            yield wrap(piece)
        if scanner.is_done or scanner.is_wrong or is_end:
            return scanner.is_done
        yield None


def json_value(reader: Reader, max_chars: int) -> Steps[tuple[str, Any] | None]:
    """Return the text of one value and the value; None if it is no JSON, ends early or has more characters."""
    scanner, found = JsonScanner(), ""
    while True:
        text, is_end = reader.unread()
        used, piece = scanner.take(text)
        reader.skip(used)
        found += piece
        if is_end:
            found += scanner.end()
        if scanner.is_done:
            return _read(found)
        if scanner.is_wrong or is_end or len(found) > max_chars:
            return None
        yield None


def _read(text: str) -> tuple[str, Any] | None:
    try:
        return text, json.loads(text)
    except ValueError:
        return None
