"""Gives arguments of calls the types that their schemas want, in all syntaxes of calls."""

from __future__ import annotations

from moeflow.text.tool_syntax.events import Arguments, CallBegun
from moeflow.text.tool_syntax.json_scanner import JsonScanner
from moeflow.text.tool_syntax.reader import Steps
from moeflow.text.tool_syntax.tool import Tools


def with_types(steps: Steps[None], tools: Tools) -> Steps[None]:
    """Yield the events of a syntax. Arguments that are no JSON come as they are."""
    scanner = JsonScanner()
    for event in steps:
        if isinstance(event, Arguments):
            text = _taken(scanner, event.text)
            if text:
                yield Arguments(text)
            continue
        if event is not None and (rest := scanner.end()):
            yield Arguments(rest)
        if isinstance(event, CallBegun):
            scanner = JsonScanner(tools.arguments(event.name))
        yield event
    if rest := scanner.end():
        yield Arguments(rest)


def _taken(scanner: JsonScanner, text: str) -> str:
    if scanner.is_done or scanner.is_wrong:
        return text
    used, found = scanner.take(text)
    return found + scanner.held() + text[used:] if scanner.is_wrong else found + text[used:]
