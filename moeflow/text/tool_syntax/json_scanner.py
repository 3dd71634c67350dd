"""Follows a JSON value, character by character, in a text that is not all there yet.

With a schema, scalars come out in a type that the schema allows, if one of their readings has it:

- A number or a boolean becomes a string. `null` stays null, as models write it for an argument without a value.
- A string becomes the value whose JSON it holds.
- A number without a fraction, such as 3.0, becomes an integer.
"""

from __future__ import annotations

import json
import math
import re
from typing import Final

from moeflow.text.tool_syntax.schema_place import SchemaPlace
from moeflow.text.tool_syntax.value_set import ValueSet

MAX_DEPTH: Final = 64
_SPACE: Final = " \t\r\n"
_NUMBER: Final = "-+.eE0123456789"
_LITERALS: Final = ("true", "false", "null")
_ESCAPES: Final = '"\\/bfnrtu'
_HEX: Final = "0123456789abcdefABCDEF"
_ESCAPE_CHARS: Final = 6  # of one with a code
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')  # in a string
_HALF_PAIR: Final = re.compile(r"\\u[dD][89abAB]")  # begins a character that the next escape completes
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}  # literals as models write them, too
_KEYS: Final = ("key", "first key")  # wanted behind a comma, and behind the bracket
_CLOSING: Final = {"{": "}", "[": "]"}


def escaped(text: str) -> str:
    """Return a text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_of(text: str, values: ValueSet) -> str | None:
    """Return a text as JSON, if it is JSON or a literal of Python's, and its value is one of these."""
    text = text.strip()
    text = _PYTHON.get(text, text)
    scanner = JsonScanner()
    used, found = scanner.take(text)
    found += scanner.end()
    return found if scanner.is_done and used == len(text) and json.loads(found) in values else None


def _typed(text: str, schema: SchemaPlace) -> str:
    """Return JSON with scalars in types that a schema allows."""
    scanner = JsonScanner(schema)
    return scanner.take(text)[1] + scanner.end()


class JsonScanner:
    """Follows one value."""

    def __init__(self, schema: SchemaPlace | None = None) -> None:
        """`schema` is what the value should be; None: anything."""
        self.is_done = False
        self.is_wrong = False
        self._schema = SchemaPlace.of(True) if schema is None else schema  # of the value that is read or comes next
        self._stack: list[tuple[str, SchemaPlace]] = []  # open brackets, and the place of each value
        self._wanted = "value"  # or "first key", "key", "colon", "first item", "end"
        self._word = ""  # a number or literal that is being read
        self._in_string = False
        self._pieces: list[str] | None = None  # of a key, or of a string that may get another type
        self._escape = ""  # one that is being read, in a string
        self._held = ""  # words and escapes that may turn out to be no JSON

    def take(self, text: str) -> tuple[int, str]:
        """Read as much of a text as belongs to the value; return how many characters, and the output for them.

        The output is the beginning of JSON at any time: words and escapes come when they are complete.
        """
        out: list[str] = []
        place = 0
        while place < len(text) and not self.is_done:
            run = _PLAIN.match(text, place) if self._in_string and not self._held else None
            if run is not None:
                out.append(self._come_out(run[0]))
                place = run.end()
                continue
            char = text[place]
            if not self._follow(char):
                out += [self._release()] if self.is_done else []
                break
            self._held += escaped(char) if self._in_string and char < " " else char
            if not (self._word or self._escape or _HALF_PAIR.match(self._held[-_ESCAPE_CHARS:])):
                out.append(self._come_out(self._release()))
            place += 1
        return place, "".join(out)

    def _come_out(self, piece: str) -> str:
        """Return the output for a piece of JSON. A string that may get another type comes when it is whole."""
        if self._pieces is None:
            return piece
        self._pieces.append(piece)
        is_key = self._wanted in (*_KEYS, "colon")
        if self._in_string:
            return piece if is_key else ""
        string, self._pieces = "".join(self._pieces), None
        if not is_key:
            return self._typed_string(string)
        self._schema = self._stack[-1][1].property(json.loads(string))
        return piece

    def _release(self) -> str:
        """Return the held text. An escape that is half a character becomes U+FFFD: not every parser takes it."""
        held, self._held = self._held, ""
        if len(held) < _ESCAPE_CHARS or "\\ud" not in held.lower():
            return held
        text = held if self._in_string else held[:-1]  # without the quote that ends it
        halves = json.loads(f'"{text}"').encode("utf-16-le", "surrogatepass")
        return escaped(halves.decode("utf-16-le", "replace")) + held[len(text) :]

    def _typed_string(self, string: str) -> str:
        value, values = json.loads(string), self._schema.values
        found = None if value in values else json_of(value, values)
        return string if found is None else _typed(found, self._schema)

    def _typed_word(self, word: str) -> str:
        value, values = json.loads(word), self._schema.values
        if isinstance(value, float) and value in values and "number" not in values.types and value.is_integer():
            return str(int(value))
        is_text = value is not None and value not in values and word in values
        return f'"{word}"' if is_text else word

    def held(self) -> str:
        """Return the text that was taken and did not come out."""
        pieces = [] if self._wanted in _KEYS else self._pieces or []
        return "".join((*pieces, self._held))

    def end(self) -> str:
        """Return the held text that is complete because the text ends here."""
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
            if wanted in _KEYS or not self._may_be_string():
                self._pieces = []
        elif wanted in ("value", "first item") and char in "{[":
            self._stack.append((char, self._schema))
            self._schema = self._schema.item
            self._wanted = "first key" if char == "{" else "first item"
            self.is_wrong = len(self._stack) > MAX_DEPTH
        elif wanted in ("value", "first item") and (char == "-" or char.isdigit() or char in "tfn"):
            self._word = char
        elif wanted == "colon" and char == ":":
            self._wanted = "value"
        elif wanted == "end" and char == ",":
            bracket, schema = self._stack[-1]
            self._schema = schema.item
            self._wanted = "key" if bracket == "{" else "value"
        elif wanted in ("end", "first key", "first item") and char == _CLOSING[self._stack[-1][0]]:
            self._stack.pop()
            self._end_value()
        else:
            self.is_wrong = True

    def _may_be_string(self) -> bool:
        values = self._schema.values
        return "string" in values.types or values.has_only_strings

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
        self._held = self._typed_word(word)
        self._end_value()

    def _end_value(self, *, is_string: bool = False) -> None:
        if is_string and self._wanted in _KEYS:
            self._wanted = "colon"
        elif self._stack:
            self._wanted = "end"
        else:
            self.is_done = True
