"""Finds stop strings in a text that comes in pieces, and holds back what may become one.

Knows nothing of tokens: only text goes in and out.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopWatch:
    """Finds stop strings in a text that comes in pieces, however it is cut into them.

    The first stop string to be complete ends the text; of several that end at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str], *, include_match: bool) -> None:
        self.match: str | None = None
        self._stops = stops
        self._include_match = include_match
        self._held = ""  # the longest end of the text that some stop string begins with

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Take a piece of text and return the part that cannot belong to a stop string.

        With `may_match` false, a stop string that would be complete in this piece is ordinary text.
        """
        if not self._stops or not text:
            return text
        text = self._held + text
        if may_match:
            found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
            if found:
                end, start, self.match = min(found)
                self._held = ""
                return text[: end if self._include_match else start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        certain = len(text) - num_held
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return the text that was held back."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are the beginning, but not all, of a stop string."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
