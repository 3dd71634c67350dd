"""One client's connection: uvicorn's, with an end for clients that send or read too slowly, and with errors of HTTP
itself answered as error objects.

A client has `patience_s` seconds for a request's head, and as much for its body, plus a second for each `bytes_per_s`
received bytes. So large uploads work, and trickles end. A connection that reads no written bytes is closed after
`stall_s`. (Apache's mod_reqtimeout has the same rule.)
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import h11
import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from moeflow.server.errors import ApiError
from moeflow.server.piece_writer import offer_chunks
from moeflow.server.request_log import RequestRecord, new_request_id, record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How slow clients may be."""

    patience_s: float = 20.0
    bytes_per_s: float = 1024.0
    stall_s: float = 60.0


PATIENCE = Patience()
_REFUSED_S = 1.0  # for a refused client to read its answer


class TimedConnection(H11Protocol):
    """A connection that its server asks now and then to end itself if its client is too slow."""

    def __init__(
        self,
        *args: Any,
        patience: Patience,
        on_open: Callable[[TimedConnection], None],
        on_refusal: Callable[[ApiError], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._patience = patience
        self._on_open = on_open
        self._on_refusal = on_refusal
        self._awaited: tuple[object, object] = (None, self.conn.their_state)  # a request and which part of it
        self._awaited_since_s = time.monotonic()
        self._num_bytes = 0  # of that part
        self._heard_s = self._awaited_since_s
        self._is_refused = False
        self._num_unsent = 0
        self._unsent_since_s = self._awaited_since_s

    @property
    def address(self) -> str | None:
        """The client's address; None: unknown."""
        return self.client[0] if self.client else None

    @property
    def silent_since_s(self) -> float | None:
        """When the connection last got a piece of a request; None: a request is complete and is answered."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        awaits_body = self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE
        is_busy = (is_answering and not awaits_body) or self.transport.get_write_buffer_size() > 0
        return None if is_busy and not self._is_refused else self._heard_s

    def close_silently(self) -> None:
        """Close the connection without an answer. Its descriptor is as good as closed, so it no longer counts."""
        self.connections.discard(self)
        self.transport.abort()

    def refuse(self) -> None:
        """Answer that the server is full, and close the connection once the client has had time to read that."""
        error = ApiError(503, "too_many_connections", "The server has too many open connections; try again later")
        self._is_refused = True
        self._write(error, new_request_id())
        self._on_refusal(error)
        if self.transport.can_write_eof():  # to close at once resets the connection of a client that still sends
            self.transport.write_eof()
            self.loop.call_later(_REFUSED_S, self.transport.close)
        else:
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection, unless too many are open."""
        super().connection_made(transport)
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent. TLS brings data even after the server's close."""
        if self._is_refused or self.transport.is_closing():
            return
        self._num_bytes += len(data)
        self._heard_s = time.monotonic()
        super().data_received(data)
        self._note_what_is_awaited(time.monotonic())

    def handle_events(self) -> None:
        """Begin requests that have arrived. Their streams may write pieces of the body with `piece_writer`."""
        super().handle_events()
        if self.cycle is not None and self.scope["http_version"] == "1.1":
            offer_chunks(cast(Scope, self.scope), self.cycle)

    def end_if_slow(self, now_s: float) -> None:
        """Close the connection if its client has taken too long to send or to read."""
        if not self.transport.is_closing():
            self._check_sending(now_s)
        self._check_reading(now_s)

    def _check_sending(self, now_s: float) -> None:
        self._note_what_is_awaited(now_s)
        allowed_s = self._patience.patience_s + self._num_bytes / self._patience.bytes_per_s
        if now_s - self._awaited_since_s > allowed_s:
            if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
                self.transport.close()  # nothing was asked: browsers open connections in advance
            else:
                self._refuse(ApiError(408, "request_timeout", "The request came too slowly"))

    def _note_what_is_awaited(self, now_s: float) -> None:
        """Start the clock anew when the client has something else to send now, or nothing."""
        awaited = (self.cycle, self.conn.their_state)
        is_idle = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) or self.timeout_keep_alive_task is not None
        if awaited != self._awaited or is_idle or self.flow.read_paused:
            self._awaited, self._awaited_since_s, self._num_bytes = awaited, now_s, 0

    def _check_reading(self, now_s: float) -> None:
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent == 0 or num_unsent < self._num_unsent:
            self._unsent_since_s = now_s
        self._num_unsent = num_unsent
        if now_s - self._unsent_since_s > self._patience.stall_s:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP. uvicorn calls it while it handles h11's error, which has the details."""
        error = sys.exception()
        status, reason = 400, msg
        if isinstance(error, h11.RemoteProtocolError):
            status, reason = (
                error.error_status_hint,
                str(error).partition(": bytearray")[0],
            )
        self._refuse(ApiError(status, "invalid_http", f"This is not a valid HTTP request: {reason}"))

    def _refuse(self, error: ApiError) -> None:
        """Answer, if nothing was answered yet, and close."""
        has_begun = self.cycle is not None and not self.cycle.response_complete  # the application is at work on it
        record = record_of(cast(Scope, self.scope)) if has_begun else RequestRecord(new_request_id())
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            record.status, record.error = error.status_code, error
            self._write(error, record.request_id)
            self._on_refusal(error)
            if not has_begun:
                record.client = self.client[0] if self.client else None
                record.log()
        if has_begun:
            self.cycle.disconnected = True  # the application learns of it when the connection is gone
        self.transport.close()

    def _write(self, error: ApiError, request_id: str) -> None:
        body = msgspec.json.encode(error.body)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", request_id.encode()),
        ]
        status, reason = error.status_code, STATUS_PHRASES[error.status_code]
        head = h11.Response(status_code=status, headers=[*self.server_state.default_headers, *headers], reason=reason)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
