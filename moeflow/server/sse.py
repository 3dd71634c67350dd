"""Server-sent events as OpenAI and Anthropic send them: `data: {json}`, with a name before it or not. Lines of JSON
as Ollama sends them.

Encoding is msgspec on plain dicts: this runs for every token of every stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from moeflow.server.disconnect import ClientDisconnected, while_connected
from moeflow.server.piece_writer import WritePiece, piece_writer

PING_S: Final = 10.0  # at most between two events, and before the headers of a stream
EVENTS: Final = "text/event-stream"
NDJSON: Final = "application/x-ndjson"
COMMENT = b": ping\n\n"  # clients skip it
DONE = b"data: [DONE]\n\n"  # the end of OpenAI's older streams
_encoder = msgspec.json.Encoder()
# `str.splitlines` splits at these characters, and JSON may hold them unescaped. Some clients read events with it.
_LINE_ENDS: Final = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def one_line(payload: dict[str, Any]) -> bytes:
    """Return JSON that is one line, also for clients that split at every line end of Unicode."""
    encoded = _encoder.encode(payload)
    if not encoded.isascii():
        for character, escaped in _LINE_ENDS:
            encoded = encoded.replace(character, escaped)
    return encoded


def event(payload: dict[str, Any]) -> bytes:
    """Return one event's bytes."""
    return b"data: " + one_line(payload) + b"\n\n"


def line(payload: dict[str, Any]) -> bytes:
    """Return one object of a stream of lines."""
    return one_line(payload) + b"\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """Return the bytes of an event that goes by the name in its `type`."""
    return f"event: {payload['type']}\n".encode() + event(payload)


async def is_done_soon(work: asyncio.Task[Any]) -> bool:
    """Wait as long as a connection may be silent; return whether the work is done."""
    await asyncio.wait((work,), timeout=PING_S)
    return work.done()


class EventStream(StreamingResponse):
    """Sends events as they come, and a ping after each pause; closes their source when the client leaves."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None], ping: bytes, media_type: str
    ) -> None:
        """Take the events, and what to call in the end, also if the client leaves before the first one is asked for."""
        self._events = events
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type=media_type)
        self._on_end = on_end
        self._ping = ping
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the source ends; a client that goes away is not an error here."""
        try:
            async with aclosing(self._events):
                await while_connected(receive, self._send(send, piece_writer(scope, send)))
        except ClientDisconnected:
            return
        finally:
            self._on_end()

    async def _send(self, send: Send, write: WritePiece) -> None:
        """Send the events, and keep the connection busy until the last one."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent_s = time.monotonic()
        pinging = asyncio.create_task(self._send_pings(write))
        try:
            async for each in self._events:
                self._sent_s = time.monotonic()
                await write(each)
        finally:
            pinging.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pings(self, write: WritePiece) -> None:
        """Send a ping whenever no event has come for `PING_S`: a proxy cuts connections without traffic."""
        while True:
            await asyncio.sleep(max(self._sent_s + PING_S - time.monotonic(), 0.0))
            if time.monotonic() - self._sent_s >= PING_S:
                await write(self._ping)
                self._sent_s = time.monotonic()
