"""Reads JSON values from a text that is not all there yet. Strings may hold raw control characters, as models write
them; they come out escaped.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

from moeflow.engine.text.tool_syntax.reader import Reader, Steps, Wrap

MAX_DEPTH: Final = 64
_SPACE: Final = " \t\r\n"
_NUMBER: Final = "-+.eE0123456789"
_LITERALS: Final = ("true", "false", "null")
_ESCAPES: Final = '"\\/bfnrtu'
_HEX: Final = "0123456789abcdefABCDEF"
_ESCAPE_CHARS: Final = 6  # of one with a code
_HALF_PAIR: Final = re.compile(r"\\u[dD][89abAB]")  # begins a character that the next escape completes
_CLOSING: Final = {"{": "}", "[": "]"}


def json_pieces(reader: Reader, wrap: Wrap) -> Steps[bool]:
    """Yield the text of one value as it comes; return whether it is a whole one.

    It is not if the text ends in it, or is no JSON: what was read until then has been yielded.
    """
    scanner = _Scanner()
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
    """Return the text of one value and what it says; None if it is no JSON, ends early or has more characters."""
    scanner, found = _Scanner(), ""
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


def escaped(text: str) -> str:
    """Return a text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read(text: str) -> tuple[str, Any] | None:
    try:
        return text, json.loads(text)
    except ValueError:
        return None


class _Scanner:
    """Follows one value, character by character."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_wrong = False
        self._stack: list[str] = []  # brackets that are open
        self._wanted = "value"  # or "first key", "key", "colon", "first item", "end"
        self._word = ""  # a number or literal that is being read
        self._in_string = False
        self._escape = ""  # one that is being read, in a string
        self._held = ""  # words and escapes that may turn out to be no JSON

    def take(self, text: str) -> tuple[int, str]:
        """Read as much of a text as belongs to the value; return how many characters, and what they come out as.

        What comes out is the beginning of JSON at any time: words and escapes come when they are complete.
        """
        out: list[str] = []
        for place, char in enumerate(text):
            if not self._follow(char):
                out += [self._release()] if self.is_done else []
                return place, "".join(out)
            self._held += escaped(char) if self._in_string and char < " " else char
            if not (self._word or self._escape or _HALF_PAIR.match(self._held[-_ESCAPE_CHARS:])):
                out.append(self._release())
            if self.is_done:
                return place + 1, "".join(out)
        return len(text), "".join(out)

    def _release(self) -> str:
        """Return what was held back. An escape that is half a character becomes U+FFFD: not every parser takes it."""
        held, self._held = self._held, ""
        if len(held) < _ESCAPE_CHARS or "\\ud" not in held.lower():
            return held
        text = held if self._in_string else held[:-1]  # without the quote that ends it
        halves = json.loads(f'"{text}"').encode("utf-16-le", "surrogatepass")
        return escaped(halves.decode("utf-16-le", "replace")) + held[len(text) :]

    def end(self) -> str:
        """The text ends here: return what was held back and is complete by that."""
        if self._word and not self._stack:
            self._end_word()
        return self._release() if self.is_done else ""

    def _follow(self, char: str) -> bool:
        """Take one character; return whether it is part of the value."""
        if self._in_string:
            self._follow_string(char)
            return not self.is_wrong
        if self._word:
            if char in _NUMBER or char.islower():
                self._word += char
                return True
            self._end_word()
            if self.is_done or self.is_wrong:
                return False
        if char not in _SPACE:
            self._follow_sign(char)
        return not self.is_wrong

    def _follow_string(self, char: str) -> None:
        if self._escape:
            self._escape += char
            is_code = self._escape[1] == "u"
            self.is_wrong = char not in (_HEX if is_code and len(self._escape) > 2 else _ESCAPES)
            if len(self._escape) == (6 if is_code else 2):
                self._escape = ""
        elif char == "\\":
            self._escape = char
        elif char == '"':
            self._in_string = False
            self._end_value(is_string=True)

    def _follow_sign(self, char: str) -> None:
        wanted = self._wanted
        if char == '"' and wanted not in ("colon", "end"):
            self._in_string = True
        elif wanted in ("value", "first item") and char in "{[":
            self._stack.append(char)
            self._wanted = "first key" if char == "{" else "first item"
            self.is_wrong = len(self._stack) > MAX_DEPTH
        elif wanted in ("value", "first item") and (char == "-" or char.isdigit() or char in "tfn"):
            self._word = char
        elif wanted == "colon" and char == ":":
            self._wanted = "value"
        elif wanted == "end" and char == ",":
            self._wanted = "key" if self._stack[-1] == "{" else "value"
        elif wanted in ("end", "first key", "first item") and char == _CLOSING[self._stack[-1]]:
            self._stack.pop()
            self._end_value()
        else:
            self.is_wrong = True

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if word not in _LITERALS:
            try:
                number = json.loads(word)
            except ValueError:
                number = math.inf
            if number in (math.inf, -math.inf):  # too large to be one, or none
                self.is_wrong = True
                return
        self._end_value()

    def _end_value(self, *, is_string: bool = False) -> None:
        if is_string and self._wanted in ("key", "first key"):
            self._wanted = "colon"
        elif self._stack:
            self._wanted = "end"
        else:
            self.is_done = True
