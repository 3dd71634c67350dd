"""Server-sent events as OpenAI and Anthropic send them: `data: {json}`, with a name before it or not.

Encoding is msgspec on plain dicts: this runs for every token of every stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from moeflow.server.disconnect import ClientDisconnected, while_connected

PING_S: Final = 15.0
DONE = b"data: [DONE]\n\n"  # the end of OpenAI's older streams
_encoder = msgspec.json.Encoder()


def event(payload: dict[str, Any]) -> bytes:
    """Return one event's bytes."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """Return the bytes of an event that goes by the name in its `type`."""
    return f"event: {payload['type']}\n".encode() + event(payload)


async def with_pings(events: AsyncGenerator[bytes, None], ping: bytes) -> AsyncGenerator[bytes, None]:
    """Yield events, and a ping wherever none has come for so long that somebody between might cut the connection."""
    async with aclosing(events):
        while True:
            coming = asyncio.ensure_future(anext(events, None))
            try:
                while not (await asyncio.wait({coming}, timeout=PING_S))[0]:
                    yield ping
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.wait({coming})
            event = coming.result()
            if event is None:
                return
            yield event


class EventStream(StreamingResponse):
    """Sends events as they come and closes their source when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None], ping: bytes = b"") -> None:
        """Take the events, and what to call in the end, also if the client leaves before the first one is asked for.

        `ping` is sent where nothing else comes for long.
        """
        self._events = with_pings(events, ping) if ping else events
        super().__init__(self._events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the source ends; a client that goes away is not an error here."""
        try:
            async with aclosing(self._events):
                await while_connected(receive, self.stream_response(send))
        except ClientDisconnected:
            return
        finally:
            self._on_end()
