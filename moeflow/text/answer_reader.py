"""Parses an answer's text into reasoning, text for the user, and calls of tools. As it comes, piece by piece."""

from __future__ import annotations

from collections.abc import Callable

from moeflow.text.tool_syntax.events import Content, Event
from moeflow.text.tool_syntax.reader import Reader, Steps


class AnswerReader:
    """Feeds one answer to who understands it."""

    def __init__(self, read: Callable[[Reader], Steps[None]], begun: str = "", head: str = "") -> None:
        """The answer begins with `head` and the text `begun`; events leave both out."""
        self._reader = Reader()
        self._steps = read(self._reader)
        self._has_ended = False
        self.text_behind = ""  # the last thing that became certain, as far as it had come then
        self._num_begun = len(begun)  # characters of `begun` that no event had yet
        self.push(head + begun)

    def push(self, text: str) -> list[Event]:
        """Take a piece of text, and return what became certain."""
        if text:
            self._reader.feed(text)
        return self._new(self._run()) if text else []

    def finish(self) -> list[Event]:
        """Return the remaining events: the answer ends here."""
        self._reader.close()
        return self._new(self._run())

    def _new(self, events: list[Event]) -> list[Event]:
        """Return events without the text that `begun` had. Reasoning or a call ends that text."""
        found: list[Event] = []
        for event in events:
            if not isinstance(event, Content):
                self._num_begun = 0
                found.append(event)
            elif len(event.text) > self._num_begun:
                found.append(Content(event.text[self._num_begun :]))
                self._num_begun = 0
            else:
                self._num_begun -= len(event.text)
        return found

    def _run(self) -> list[Event]:
        found: list[Event] = []
        while not self._has_ended:
            try:
                event = next(self._steps)
            except StopIteration:
                self._has_ended = True
                break
            if event is None:
                break
            found.append(event)
            self.text_behind, _ = self._reader.unread()
        return found
