"""Which tokens make up the text that a model says to the user, where it also reasons and calls.

Tokens are known at once, text and its kind later. Then the text is looked up in the tokens' bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moeflow.text.output_text import TokenText
from moeflow.text.tool_syntax.events import Content, Event, Reasoning


class TextTokens:
    """The tokens of one answer of which it is not certain yet what they say."""

    def __init__(self) -> None:
        self._pending: list[TokenText] = []

    def split(
        self, tokens: Sequence[TokenText], events: Sequence[Event], text_behind: str = ""
    ) -> Iterator[tuple[Event, list[TokenText]]]:
        """Yield the events that a delta with these tokens has brought, those of text with the tokens that say it.

        `text_behind` has come behind the last event, and may turn out to be text.
        """
        self._pending += tokens
        for event in events:
            match event:
                case Content():
                    yield event, self._take(event.text)
                case Reasoning():
                    self._take(event.text)
                    yield event, []
                case _:  # a call is not written as it is read
                    yield event, []
        if events and not isinstance(events[-1], Content | Reasoning):
            self._drop_until(text_behind)

    def _drop_until(self, text: str) -> None:
        """Drop all tokens before those of a text at the end; all, if it is not found."""
        start, end = b"".join(token.utf8 for token in self._pending).rfind(text.encode()), 0
        if not text or start < 0:
            self._pending.clear()
        while self._pending and end + len(self._pending[0].utf8) <= start:
            end += len(self._pending.pop(0).utf8)

    def _take(self, text: str) -> list[TokenText]:
        """Return the tokens of a text, all there are if it is not found; drop these and those before."""
        wanted, written = text.encode(), b"".join(token.utf8 for token in self._pending)
        start = written.find(wanted)
        start, stop = (start, start + len(wanted)) if start >= 0 else (0, len(written))
        taken: list[TokenText] = []
        num_over, end = 0, 0
        for number, token in enumerate(self._pending):
            begin, end = end, end + len(token.utf8)
            if begin < stop and end > start:
                taken.append(token)
            if end <= stop:
                num_over = number + 1
        del self._pending[:num_over]
        return taken
