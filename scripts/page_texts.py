"""Compares the texts of the page with its dictionaries.

    python scripts/page_texts.py

Lists for each language of `web/languages.js` the texts that lack a translation, and translations that nothing uses.
Texts are the string literals in the first argument of `tr(...)` and `textKey(...)`, the titles in
`inspect/views.js`, the server's sentences in `stories/sentences.py`, and what the page's document shows. Exits with 1
where a list is not empty.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from moeflow.server.stories.sentences import NOT_OBSERVED, REASONS

WEB = Path(__file__).parent.parent / "moeflow" / "server" / "web"
_ATTRIBUTES = ("aria-label", "placeholder", "title")
_UNSEEN = ("script", "style", "noscript", "title")  # elements whose text the page does not translate
_VOID = ("meta", "link", "input", "br", "hr", "path")  # elements without an end
_CALL = re.compile(r"(?<![\w.])(?:tr|textKey)\(")
_TITLE = re.compile(r'\btitle: ("(?:[^"\\\n]|\\.)*")')
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|`(?:[^`\\]|\\.)*`|.', re.DOTALL)
_LANGUAGE = re.compile(r'^  ([a-z]{2}): \{\s*name: "[^"]+",\s*texts: \{(.*?)\},?\s*\},?$', re.MULTILINE | re.DOTALL)
_PAIR = re.compile(r'("(?:[^"\\\n]|\\.)*"):\s*("(?:[^"\\\n]|\\.)*")')


def script_texts(source: str) -> tuple[set[str], list[str]]:
    """Return the texts in the calls of a module, and the calls whose text only a variable has."""
    texts: set[str] = set()
    variable = []
    for call in _CALL.finditer(source):
        argument = "".join(_first_argument(source[call.end() :]))
        found = [json.loads(token) for token in _TOKEN.findall(argument) if token.startswith('"')]
        # A string behind a comparison is no text: tr(kind === "all" ? "All" : "One").
        compared = {json.loads(text) for text in re.findall(r'[=!]==\s*("[^"]*")', argument)}
        texts.update(text for text in found if text not in compared)
        if not found:
            variable.append(argument.strip())
    return texts, variable


def _first_argument(rest: str) -> Iterator[str]:
    depth = 0
    for token in _TOKEN.findall(rest):
        depth += (token in "([{") - (token in ")]}")
        if depth < 0 or (depth == 0 and token == ","):
            return
        yield token


class _Document(HTMLParser):
    """Collects the texts of a document and of its templates."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: set[str] = set()
        self.open: list[bool] = []  # for each open element, whether its text is left as it is

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the texts in attributes."""
        values = dict(attrs)
        self.texts.update(text for name in _ATTRIBUTES if (text := values.get(name)) and _has_words(text))
        if tag not in _VOID:
            self.open.append(tag in _UNSEEN or values.get("translate") == "no" or (self.open or [False])[-1])

    def handle_endtag(self, tag: str) -> None:
        """Leave an element."""
        if tag not in _VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        """Take the text between two tags, as `translateTree` of web/translate.js does."""
        if data.strip() and _has_words(data) and not self.open[-1]:
            self.texts.add(data.strip())


def _has_words(text: str) -> bool:
    return any(char.isalpha() for char in text)


def page_texts(web: Path = WEB) -> tuple[set[str], list[str]]:
    """Return all texts of the page, and the calls whose text only a variable has, each after the name of its file."""
    document = _Document()
    document.feed((web / "index.html").read_text(encoding="utf-8"))
    texts, variable = document.texts, []
    for path in sorted(web.rglob("*.js")):
        name = path.relative_to(web).as_posix()
        if name.startswith("vendor/") or name in ("translate.js", "languages.js"):
            continue
        source = path.read_text(encoding="utf-8")
        found, unknown = script_texts(source)
        texts |= found
        if name == "inspect/views.js":
            texts |= {json.loads(title) for title in _TITLE.findall(source)}
        variable += [f"{name}: tr({argument})" for argument in unknown]
    return texts | {*REASONS.values(), *NOT_OBSERVED.values()}, variable


def dictionaries(web: Path = WEB) -> dict[str, dict[str, str]]:
    """Return the translations by language and English text."""
    source = (web / "languages.js").read_text(encoding="utf-8")
    return {
        code: {json.loads(key): json.loads(text) for key, text in _PAIR.findall(body)}
        for code, body in _LANGUAGE.findall(source)
    }


def differences(texts: set[str], translated: dict[str, str]) -> list[str]:
    """Return a line for each text that lacks a translation, is not used, or has other values in braces than it."""
    missing = [f"missing: {json.dumps(text, ensure_ascii=False)}" for text in sorted(texts - set(translated))]
    unused = [f"unused: {json.dumps(text, ensure_ascii=False)}" for text in sorted(set(translated) - texts)]
    values = [
        f"values differ: {json.dumps(text, ensure_ascii=False)}"
        for text, other in sorted(translated.items())
        if set(re.findall(r"\{\w+\}", text)) != set(re.findall(r"\{\w+\}", other))
    ]
    return [*missing, *unused, *values]


def main() -> None:
    """Write the differences of every language."""
    texts, variable = page_texts()
    found = {code: differences(texts, translated) for code, translated in dictionaries().items()}
    print(f"{len(texts)} texts; {len(variable)} calls take theirs from a variable:", *variable, sep="\n  ")
    for code, lines in found.items():
        print(f"{code}: {len(lines)} differences", *lines, sep="\n  ")
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
