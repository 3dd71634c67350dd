"""Forwards all requests from a front to its server but generating ones: the server has the shared state.

The server's answer, its request log and its guards are those of a server without fronts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Final

import httpx
import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeflow.server.disconnect import ClientDisconnected, while_connected
from moeflow.server.errors import ApiError
from moeflow.server.guard.auth import given_keys
from moeflow.server.paths import api_path
from moeflow.server.service import Service

_OWN: Final = frozenset(  # POST requests that a front answers
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/tokenize",
        "/detokenize",
    )
)
_HOP_BY_HOP: Final = frozenset(
    (b"connection", b"expect", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_DATE: Final = frozenset((b"date",))  # each process adds it
_JSON: Final = (b"content-type", b"application/json")
_FORWARDED: Final = frozenset((b"x-forwarded-for", b"x-forwarded-proto"))


class Forwarding:
    """ASGI application of a front."""

    def __init__(self, app: ASGIApp, service: Service, server_socket: str) -> None:
        """`app` answers what the front answers itself, `server_socket` is the path of the server's own socket."""
        self._app = app
        self._service = service
        # The server closes idle connections after five seconds.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        transport = httpx.AsyncHTTPTransport(uds=server_socket, limits=limits)
        self._server = httpx.AsyncClient(transport=transport, timeout=None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or forward it."""
        is_path = _own_path(scope).startswith(b"/")  # not that of OPTIONS *
        if not is_path or (self._is_own(scope) and not self._is_limited(scope)):
            await self._app(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    @staticmethod
    def _is_own(scope: Scope) -> bool:
        return scope["method"] == "POST" and api_path(scope) in _OWN

    def _is_limited(self, scope: Scope) -> bool:
        """Whether its key has limits, which the server counts."""
        keys = self._service.keys
        accounts = [keys.find(key) for key in given_keys(Headers(scope=scope))] if keys else []
        return any(account is not None and account.is_limited for account in accounts)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(scope, receive)
        raw_path, query = _own_path(scope), scope["query_string"]
        try:
            url = httpx.URL("http://server", raw_path=raw_path + b"?" * bool(query) + query)
        except httpx.InvalidURL:
            await _send_error(ApiError(400, "invalid_http", "The request's path is invalid"), send)
            return
        # Made directly: the client would add headers of its own, such as the encodings that it accepts.
        content = body.pieces() if body.is_expected else None
        request = httpx.Request(scope["method"], url, headers=_headers(scope), content=content)
        with suppress(ClientDisconnected):
            await while_connected(body.receive_next, self._answer(request, send))

    async def _answer(self, request: httpx.Request, send: Send) -> None:
        try:
            response = await self._server.send(request, stream=True)
        except httpx.TransportError:
            await _send_error(ApiError(503, "shutting_down", "The server takes no requests now; try again"), send)
            return
        try:
            headers = [(name.lower(), value) for name, value in response.headers.raw]
            kept = [(name, value) for name, value in headers if name not in _HOP_BY_HOP | _DATE]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for piece in response.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await response.aclose()


async def _send_error(error: ApiError, send: Send) -> None:
    await send({"type": "http.response.start", "status": error.status_code, "headers": [_JSON]})
    await send({"type": "http.response.body", "body": msgspec.json.encode(error.body)})


class _Body:
    """A request's body, and then its client's end."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name for name, _ in scope["headers"]}
        self.is_expected = not names.isdisjoint((b"content-length", b"transfer-encoding"))
        self._receive = receive
        self._is_read = asyncio.Event()
        if not self.is_expected:
            self._is_read.set()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body. Raises: ClientDisconnected."""
        has_more = True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            has_more = message.get("more_body", False)
            yield message.get("body", b"")
        self._is_read.set()

    async def receive_next(self) -> Message:
        """Return the next message after the body."""
        await self._is_read.wait()
        return await self._receive()


def _own_path(scope: Scope) -> bytes:
    """Return the path without the prefix of a proxy."""
    path: bytes = scope.get("raw_path", b"")
    return path.removeprefix(scope.get("root_path", "").encode("ascii"))


def _headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers for the server, with the client as this front knows it."""
    left_out = _HOP_BY_HOP | _FORWARDED
    headers = [(name, value) for name, value in scope["headers"] if name not in left_out]
    headers.append((b"x-forwarded-proto", scope["scheme"].encode()))
    if scope["client"]:
        headers.append((b"x-forwarded-for", scope["client"][0].encode()))
    return headers
