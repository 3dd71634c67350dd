"""Calls behind markers in a text: a marker without a call is text like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeflow.text.tool_syntax.events import Content
from moeflow.text.tool_syntax.reader import Reader, Steps

ReadCall = Callable[[str], Steps[bool]]


def marked_calls(reader: Reader, markers: Sequence[str], read_call: ReadCall, end: str = "") -> Steps[None]:
    """Yield text, and the call behind each marker; `read_call` gets the marker and returns whether there is a call.

    Models may forget the marker at the `end` of a call.
    """
    while (marker := (yield from reader.text_until(markers, Content))) is not None:
        reader.forget()
        if (yield from read_call(marker)):
            yield from reader.skip_space()
            if end:
                yield from reader.takes(end)
                yield from reader.skip_space()
        else:
            reader.go_back(0)
            yield Content(marker)
