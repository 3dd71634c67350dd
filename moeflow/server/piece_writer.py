"""Writes pieces of a body past middleware and HTTP's state machine, which take longer than all else of a token.

The head and the end of a response go through `send`. Between them, nothing reads a piece or changes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Send

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

WritePiece = Callable[[bytes], Awaitable[None]]
WRITER: Final = "moeflow.write_piece"  # in the scope


def offer_chunks(scope: MutableMapping[str, Any], cycle: RequestResponseCycle) -> None:
    """Have `piece_writer` write to this connection. Its bodies of unknown length must be chunked, as in HTTP/1.1."""
    scope.setdefault(WRITER, partial(_write_chunk, cycle))


def piece_writer(scope: MutableMapping[str, Any], send: Send) -> WritePiece:
    """Return how to write a piece of a body of unknown length that has begun and has not ended."""
    write: WritePiece | None = scope.get(WRITER)
    return write or partial(_send_piece, send)


async def _write_chunk(cycle: RequestResponseCycle, piece: bytes) -> None:
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if piece and not cycle.disconnected:  # an empty chunk would end the body
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
