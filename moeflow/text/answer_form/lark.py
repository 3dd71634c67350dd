"""Writes grammars as llguidance reads them: Lark, where `%json` stands for values of a schema.

Its expressions may name tokens by ids: special tokens that separate parts of an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from moeflow.core.errors import RequestError
from moeflow.text.answer_form.form import ChoiceForm, Form, JsonForm
from moeflow.text.answer_form.json_schema import held_schema

USER: Final = "user"  # the name of a user's own grammar
WHITESPACE: Final = r"[ \t\n]{1,64}"  # between the parts of JSON: an answer of whitespace without end has no use
ANY_TEXT: Final = "ANY_TEXT"
PART: Final = " // of "  # before the words for a rule, at the end of its line
_ANY: Final = "(?s:.*)"
_MAX_CHARACTERS: Final = 16 * 1024 * 1024  # of the schemas in a grammar
_MANY: Final = 500  # choices; a grammar has a limit of alternatives at one place, a terminal has none


class LarkWriter:
    """Assembles a grammar."""

    def __init__(self, markers: Iterable[str], added_id: Callable[[str], int | None]) -> None:
        """`markers` are texts that may be tokens of their own, which `added_id` tells."""
        ids = {marker: token_id for marker in markers if (token_id := added_id(marker)) is not None}
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._num_characters = 0  # of all forms
        self._rules: dict[str, str] = {ANY_TEXT: "/(?s:.+)/"}

    def text(self, text: str) -> str:
        """Return the expression for a text."""
        parts: list[str] = []
        place = 0
        for found in self._markers.finditer(text):
            parts += [_quoted(text[place : found.start()]), f"<[{self._ids[found[0]]}]>"]
            place = found.end()
        return " ".join(filter(None, (*parts, _quoted(text[place:]))))

    def json(self, schema: dict[str, Any]) -> str:
        """Return the expression for JSON that a schema describes.

        Raises: RequestError for what answers could not be held to.
        """
        return "%json " + self._counted(json.dumps(held_schema(schema, WHITESPACE)))

    def text_until(self, end: str, max_tokens: int | None = None, *, pattern: str = _ANY) -> str:
        """Return the expression for a text up to and including an end, of so many tokens at most.

        The text matches a regular expression. Until it does, the end is a part of the text.

        Raises: ValueError if the number of tokens is to be limited, and the end is no token of its own.
        """
        limit = "" if max_tokens is None else f"max_tokens={max_tokens}"
        body = "/" + pattern.replace("/", "\\/").replace("\n", "\\n") + "/"
        if end in self._ids:
            text = f"{self.rule(ANY_TEXT, limit)}?" if pattern == _ANY else self.rule(body, limit)
            return f"{text} <[{self._ids[end]}]>"
        if max_tokens is not None:
            raise ValueError(f"{end!r} is no token of this model")
        return self.rule(body, f"suffix={json.dumps(end, ensure_ascii=False)}")

    def bounded_text_until(self, end: str, min_chars: int, max_chars: int | None) -> str:
        """Return the expression for a text of so many characters, and the end behind it. None: of any length."""
        chars = f"/(?s:.{{{min_chars},{'' if max_chars is None else max_chars}}})/"
        if end in self._ids:
            return f"{self.terminal(chars)}{'' if min_chars else '?'} <[{self._ids[end]}]>"
        # Readers stop at the first end, so a text that needs some characters may not have one within them.
        without_end = f" & ~/(?s:.*){_pattern_of(end.strip())}(?s:.*)/" if min_chars else ""
        return self.rule(self.terminal(chars + without_end), f"suffix={json.dumps(end, ensure_ascii=False)}")

    def anything(self) -> str:
        """Return the expression for any text, and any tokens that stand for none."""
        return f"({ANY_TEXT} | <[*]>)*"

    def form(self, form: Form) -> str:
        """Return the expression for what an answer has to be."""
        match form:
            case JsonForm():
                return self.json(form.schema)
            case ChoiceForm():
                choices = self._counted(" | ".join(_quoted(choice) or '""' for choice in form.choices))
                return self.terminal(choices) if len(form.choices) > _MANY else f"({choices})"
            case _:
                return f"@{USER}"

    def _counted(self, written: str) -> str:
        self._num_characters += len(written)
        if self._num_characters > _MAX_CHARACTERS:
            raise RequestError(
                f"the schemas take more than {_MAX_CHARACTERS:,} characters: models may write arguments one by one, "
                "and each repeats the definitions that it refers to. Make these shorter, or leave out strict"
            )
        return written

    def rule(self, body: str, attributes: str = "", *, words: str = "") -> str:
        """Add a rule and return its name. Errors about it use the `words`."""
        name = f"part_{len(self._rules)}"
        self._rules[f"{name}[{attributes}]" if attributes else name] = f"{body}{PART}{words}" if words else body
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal, which is read as one regular expression, and return its name."""
        name = f"PART_{len(self._rules)}"
        self._rules[name] = body
        return name

    def grammar(self, start: str) -> str:
        """Return the whole grammar."""
        return "\n".join(f"{name}: {body}" for name, body in {"start": start, **self._rules}.items())


def _pattern_of(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
