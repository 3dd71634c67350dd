"""Reads a text that is not all there yet, so that a syntax can be written as if it were.

A syntax is a generator: it reads from its `Reader` and yields events. At the end of the available text it yields None,
and continues when there is more. The events depend on the text alone, not on its pieces: text that may become a marker
is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from moeflow.text.tool_syntax.events import Event

Result = TypeVar("Result")
Steps = Generator[Event | None, None, Result]
Wrap = Callable[[str], Event]

_SPACE = " \t\r\n"


class Reader:
    """A place in a text that grows."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._is_closed = False

    def feed(self, text: str) -> None:
        """Append text."""
        self._text += text

    def close(self) -> None:
        """There is no more."""
        self._is_closed = True

    def forget(self) -> None:
        """Release text that was read: earlier places are no longer valid."""
        self._text, self._at = self._text[self._at :], 0

    @property
    def place(self) -> int:
        """Where reading has come to, to go back to."""
        return self._at

    def go_back(self, place: int) -> None:
        """Read again from a place on."""
        self._at = place

    def unread(self) -> tuple[str, bool]:
        """Look at all that is there, without taking it; and whether there will be no more."""
        return self._text[self._at :], self._is_closed

    def char(self) -> Steps[str]:
        """Look at the next character, without taking it; "" at the end of the text."""
        while self._at == len(self._text):
            if self._is_closed:
                return ""
            yield None
        return self._text[self._at]

    def skip(self, count: int = 1) -> None:
        """Take characters that were looked at."""
        self._at += count

    def skip_space(self) -> Steps[None]:
        """Take whitespace."""
        while True:
            char = yield from self.char()
            if not char or char not in _SPACE:
                return
            self._at += 1

    def takes(self, literal: str) -> Steps[bool]:
        """Read a text if it comes next, and return whether it did."""
        while True:
            here = self._text[self._at : self._at + len(literal)]
            if here == literal:
                self._at += len(literal)
                return True
            if self._is_closed or not literal.startswith(here):
                return False
            yield None

    def text_until(self, markers: Sequence[str], wrap: Wrap) -> Steps[str | None]:
        """Yield text up to the first marker, as it becomes certain; return the marker, which is taken; None: the end.

        No marker may be the beginning of another.
        """
        while True:
            found = _first(self._text, self._at, markers)
            if found is None:
                end = len(self._text) if self._is_closed else len(self._text) - _held(self._text, self._at, markers)
            else:
                end = found[0]
            if end > self._at:
                text, self._at = self._text[self._at : end], end
                yield wrap(text)
            if found is not None:
                self._at += len(found[1])
                return found[1]
            if self._is_closed:
                return None
            yield None

    def whole_until(self, markers: Sequence[str], max_chars: int) -> Steps[tuple[str, str] | None]:
        """Return the text up to the first marker, and the marker; both are taken.

        None, with nothing taken: none comes, or not within so many characters.
        """
        while True:
            found = _first(self._text, self._at, markers)
            if found is not None and found[0] - self._at <= max_chars:
                text, self._at = self._text[self._at : found[0]], found[0] + len(found[1])
                return text, found[1]
            if found is not None or self._is_closed or len(self._text) - self._at > max_chars + _longest(markers):
                return None
            yield None


def _first(text: str, start: int, markers: Sequence[str]) -> tuple[int, str] | None:
    found = [(place, marker) for marker in markers if (place := text.find(marker, start)) >= 0]
    return min(found, default=None)


def _held(text: str, start: int, markers: Sequence[str]) -> int:
    """Return how many characters at the end of the text are the beginning of some marker, at most."""
    longest = min(_longest(markers) - 1, len(text) - start)
    for size in range(longest, 0, -1):
        if text.endswith(tuple(marker[:size] for marker in markers if len(marker) > size)):
            return size
    return 0


def _longest(markers: Sequence[str]) -> int:
    return max(map(len, markers))
