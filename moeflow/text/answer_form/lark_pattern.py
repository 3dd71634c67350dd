"""Converts a Lark grammar without recursion to a regular expression, which JSON strings can be held to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_MAX_CHARACTERS: Final = 64 * 1024  # of the grammar, and of the regular expression
_TOKENS: Final = re.compile(
    r"""(?P<skip>[ \t\f]+|//[^\n]*|\#[^\n]*)
      |(?P<line>\r?\n)
      |(?P<string>"(?:\\.|[^"\\\n])*"i?)
      |(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
      |(?P<import>%import\b[^\n]*)
      |(?P<name>[!?]*_?[A-Za-z][A-Za-z0-9_]*)
      |(?P<alias>->[ ]*[A-Za-z0-9_]+)
      |(?P<range>\.\.)
      |(?P<priority>\.-?[0-9]+)
      |(?P<number>[0-9]+)
      |(?P<sign>[:|()\[\]+*?~])
    """,
    re.VERBOSE,
)
_IMPORT: Final = re.compile(r"%import\s+common\s*(?:\.\s*(\w+)\s*(?:->\s*(\w+))?|\(([\w\s,]*)\))\s*(?://.*)?$")
_ENFORCED: Final = re.compile(  # without anchors, back references, and groups that look around; linear in its text
    r"""(?:\\[^AbBGzZ1-9]
          |\[\^?\]?(?:\\[^AbBGzZ1-9]|[^\]\\])*+\]
          |\((?!\?(?:[=!>\#]|<[=!]|P[<=>]))
          |[^\\\[($^]
        )*+""",
    re.VERBOSE | re.DOTALL,
)
_INT, _LETTER = "[0-9]+", "[A-Za-z]"
_NUMBER: Final = rf"(?:{_INT}(?:\.[0-9]*)?|\.{_INT})(?:[eE][+-]?{_INT})?"
_COMMON: Final = {
    "CNAME": r"[_A-Za-z][_A-Za-z0-9]*",
    "CR": r"\r",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "FLOAT": _NUMBER,
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": _INT,
    "LCASE_LETTER": "[a-z]",
    "LETTER": _LETTER,
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": _NUMBER,
    "SIGNED_FLOAT": f"[+-]?(?:{_NUMBER})",
    "SIGNED_INT": f"[+-]?{_INT}",
    "SIGNED_NUMBER": f"[+-]?(?:{_NUMBER})",
    "UCASE_LETTER": "[A-Z]",
    "WORD": f"{_LETTER}+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}


class _Token(NamedTuple):
    kind: str
    text: str


class _NotRegular(Exception):
    """The grammar has recursion, or another feature that is not converted."""


def pattern_of(grammar: str) -> str | None:
    """Return a regular expression for the texts of a grammar; None: there is none."""
    if len(grammar) > _MAX_CHARACTERS:
        return None
    try:
        pattern = _Grammar(grammar).pattern("start")
    except (_NotRegular, RecursionError):
        return None
    return enforceable(pattern)


def enforceable(pattern: str) -> str | None:
    """Return a regular expression for a whole text, without its anchors; None: it looks around, or back."""
    plain = pattern.removeprefix("^")
    plain = plain[:-1] if plain.endswith("$") and not plain.endswith(r"\$") else plain
    return plain if _ENFORCED.fullmatch(plain) else None


class _Grammar:
    """The definitions of a grammar, each converted where it is first used."""

    def __init__(self, grammar: str) -> None:
        self._patterns: dict[str, str | None] = {}  # None: under way
        self._definitions: dict[str, list[_Token]] = {}
        tokens = [*_tokens(grammar), _Token("line", "\n")]
        start = 0
        for place, token in enumerate(tokens):
            follows = tokens[place + 1] if place + 1 < len(tokens) else None
            if token.kind == "line" and (follows is None or follows.text != "|"):
                self._define(tokens[start:place])
                start = place + 1

    def pattern(self, name: str) -> str:
        """Return the regular expression for a name."""
        if name not in self._patterns:
            if name not in self._definitions:
                raise _NotRegular
            self._patterns[name] = None
            self._patterns[name] = _Expression(self, self._definitions[name]).pattern()
        found = self._patterns[name]
        if found is None or len(found) > _MAX_CHARACTERS:
            raise _NotRegular
        return found

    def _define(self, statement: list[_Token]) -> None:
        tokens = [token for token in statement if token.kind not in ("line", "alias")]
        if not tokens:
            return
        first, *rest = tokens
        if first.kind == "import":
            self._import(first.text)
            return
        if rest and rest[0].kind == "priority":
            rest = rest[1:]
        if first.kind != "name" or not rest or rest[0].text != ":":
            raise _NotRegular
        self._definitions[first.text.lstrip("!?")] = rest[1:]

    def _import(self, text: str) -> None:
        found = _IMPORT.match(text)
        if found is None:
            raise _NotRegular
        names = [(found[1], found[2] or found[1])] if found[1] else [(n.strip(),) * 2 for n in found[3].split(",")]
        for name, renamed in names:
            if name not in _COMMON:
                raise _NotRegular
            self._patterns[renamed] = f"(?:{_COMMON[name]})"


class _Expression:
    """One definition, read from left to right."""

    def __init__(self, grammar: _Grammar, tokens: list[_Token]) -> None:
        self._grammar, self._tokens, self._place = grammar, tokens, 0

    def pattern(self) -> str:
        """Return the regular expression of the whole definition."""
        pattern = self._choice()
        if self._place < len(self._tokens):
            raise _NotRegular
        return pattern

    def _choice(self) -> str:
        return f"(?:{_joined(self._choices(), '|')})"

    def _choices(self) -> Iterator[str]:
        yield _joined(self._sequence(), "")
        while self._takes("|"):
            yield _joined(self._sequence(), "")

    def _sequence(self) -> Iterator[str]:
        while (token := self._next()) is not None and token.text not in ("|", ")", "]"):
            yield self._repeated()

    def _repeated(self) -> str:
        pattern = self._atom()
        token = self._next()
        if token is None or token.text not in ("+", "*", "?", "~"):
            return pattern
        self._place += 1
        return f"(?:{pattern}){self._count() if token.text == '~' else token.text}"

    def _count(self) -> str:
        least = most = self._take("number").text
        if (token := self._next()) is not None and token.kind == "range":
            self._place += 1
            most = self._take("number").text
        return f"{{{least},{most}}}"

    def _atom(self) -> str:
        token = self._next()
        if token is None:
            raise _NotRegular
        self._place += 1
        match token.kind, token.text:
            case _, "(" | "[":
                inner = self._choice()
                if not self._takes(")" if token.text == "(" else "]"):
                    raise _NotRegular
                return inner if token.text == "(" else f"{inner}?"
            case "name", name:
                return self._grammar.pattern(name)
            case "regex", text:
                body, _, flags = text[1:].rpartition("/")
                kept = "".join(sorted(set(flags) & set("imsx")))
                return f"(?{kept}:{body.replace(chr(92) + '/', '/')})"
            case "string", text:
                return self._string(text)
        raise _NotRegular

    def _string(self, text: str) -> str:
        follows = self._next()
        if follows is not None and follows.kind == "range":
            self._place += 1
            first, last = _literal(text), _literal(self._take("string").text)
            if len(first) != 1 or len(last) != 1:
                raise _NotRegular
            return f"[{_quoted(first)}-{_quoted(last)}]"
        quoted = _quoted(_literal(text.removesuffix("i")))
        return f"(?i:{quoted})" if text.endswith("i") else quoted

    def _next(self) -> _Token | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _takes(self, text: str) -> bool:
        token = self._next()
        is_next = token is not None and token.kind == "sign" and token.text == text
        self._place += is_next
        return is_next

    def _take(self, kind: str) -> _Token:
        token = self._next()
        if token is None or token.kind != kind:
            raise _NotRegular
        self._place += 1
        return token


def _tokens(grammar: str) -> Iterator[_Token]:
    place = 0
    while place < len(grammar):
        found = _TOKENS.match(grammar, place)
        if found is None:
            raise _NotRegular
        if found.lastgroup is not None and found.lastgroup != "skip":
            yield _Token(found.lastgroup, found[0])
        place = found.end()


def _joined(parts: Iterator[str], separator: str) -> str:
    """Return the parts in a row. Raises: _NotRegular, before all of them are made, if they are too long."""
    kept, num_characters = [], 0
    for part in parts:
        num_characters += len(part) + len(separator)
        if num_characters > _MAX_CHARACTERS:
            raise _NotRegular
        kept.append(part)
    return separator.join(kept)


def _literal(quoted: str) -> str:
    try:
        value = ast.literal_eval(quoted)
    except (ValueError, SyntaxError):
        raise _NotRegular from None
    return str(value)


def _quoted(text: str) -> str:
    """Return the regular expression for a text."""
    return "".join(char if char.isalnum() or char in ' _"' else _escaped(ord(char)) for char in text)


def _escaped(code: int) -> str:
    if code < 1 << 8:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
