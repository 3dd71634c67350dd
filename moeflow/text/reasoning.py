"""Reasoning that a model writes before its answer, between two markers, and which of them a chat template knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeflow.text.tool_syntax.events import Reasoning
from moeflow.text.tool_syntax.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers before and after it."""

    begin: str
    end: str

    def read(self, reader: Reader, *, has_begun: bool) -> Steps[None]:
        """Yield reasoning that an answer begins with, if it does; what follows is left to be read.

        Line breaks at the markers belong to them.
        """
        if not has_begun:
            yield from reader.skip_space()
            if not (yield from reader.takes(self.begin)):
                reader.go_back(0)
                return
        yield from reader.skip_space()
        yield from reader.text_until((f"\n{self.end}", self.end), Reasoning)
        yield from reader.skip_space()
        reader.forget()


REASONING_MARKERS: Final = (  # a template that has the first text knows the markers
    ("</think>", ReasoningMarkers("<think>", "</think>")),
    ("[/THINK]", ReasoningMarkers("[THINK]", "[/THINK]")),
    ("<|channel>thought", ReasoningMarkers("<|channel>thought\n", "<channel|>")),
)


def reasoning_markers_of(template: str) -> ReasoningMarkers | None:
    """Return the markers that a template knows, if there are any."""
    return next((markers for sign, markers in REASONING_MARKERS if sign in template), None)
