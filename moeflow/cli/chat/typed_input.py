"""Input at the prompt: texts of one or several lines, and the history of earlier texts.

A backslash at the end continues a line. Three quotation marks open and close a text of many lines. A pasted text stays
one text.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import readline
else:
    try:
        import readline  # gives input() editing and history
    except ImportError:  # Windows has none
        readline = None

PROMPT = "> "
GOES_ON = ". "
QUOTES = '"""'
MAX_REMEMBERED = 1000  # inputs


class InputHistory:
    """Earlier inputs, in memory and in a file that only the user can read, one JSON string a line.

    A history that cannot be read or written is no reason not to talk: it is left as it is.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inputs = self._read()[-MAX_REMEMBERED:]
        if readline is not None:
            readline.set_auto_history(False)  # inputs of several lines are one
            readline.parse_and_bind("set enable-bracketed-paste on")
            readline.clear_history()
            for text in self._inputs:
                readline.add_history(text)

    def add(self, text: str) -> None:
        """Remember an input, unless it is the last one again."""
        if self._inputs[-1:] == [text]:
            return
        self._inputs.append(text)
        if readline is not None:
            readline.add_history(text)
        with suppress(OSError):
            self._write(text)

    def _write(self, text: str) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        is_long = len(self._inputs) > 2 * MAX_REMEMBERED
        written = self._inputs[-MAX_REMEMBERED:] if is_long else [text]
        mode = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if is_long else os.O_APPEND)
        with open(os.open(self._file, mode, 0o600), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(it) + "\n" for it in written)

    def _read(self) -> list[str]:
        found = []
        with suppress(OSError):
            for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):  # damaged
                    found.append(str(json.loads(line)))
        return found


def read_input() -> str:
    """Return what the user types next, of one line or several, without the spaces around it.

    Raises: EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C before anything else was typed. Later, Ctrl-C forgets it.
    """
    while True:
        line = input(PROMPT).strip()
        try:
            return (_quoted(line) if line.startswith(QUOTES) else _continued(line)).strip()
        except KeyboardInterrupt:
            click.echo()


def _quoted(line: str) -> str:
    text = line.removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        text += "\n" + input(GOES_ON)
    return text.rstrip().removesuffix(QUOTES)


def _continued(line: str) -> str:
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(GOES_ON).rstrip())
    return "\n".join(lines)
