"""Lines of a text that arrives in pieces, as server-sent events have them: they end at CR, LF or both, nowhere else.

`httpx` and `str.splitlines` also split at characters that JSON may have within a string, such as U+2028.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator


class _Splitter:
    """Turns pieces into lines."""

    def __init__(self) -> None:
        self._newlines = io.IncrementalNewlineDecoder(None, translate=True)
        self._rest = ""

    def push(self, piece: str, *, is_last: bool = False) -> list[str]:
        """Return the lines that a piece completes; at the end, also the one that nothing ends."""
        *lines, self._rest = (self._rest + self._newlines.decode(piece, final=is_last)).split("\n")
        return [*lines, self._rest] if is_last and self._rest else lines


def stream_lines(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text."""
    splitter = _Splitter()
    for piece in pieces:
        yield from splitter.push(piece)
    yield from splitter.push("", is_last=True)


async def async_stream_lines(pieces: AsyncIterable[str]) -> AsyncIterator[str]:
    """Yield the lines of a text, likewise."""
    splitter = _Splitter()
    async for piece in pieces:
        for line in splitter.push(piece):
            yield line
    for line in splitter.push("", is_last=True):
        yield line
