"""Keeps all requests of clients, and each answer's status and, where it is an error, its body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEPT_HEADERS = ("anthropic-version", "anthropic-beta", "user-agent", "content-type", "accept")


@dataclass(slots=True)
class Exchange:
    """One request and what came of it."""

    method: str
    path: str  # with the query
    headers: Mapping[str, str]
    request: bytearray = field(default_factory=bytearray)
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)

    def as_json(self) -> dict[str, Any]:
        """Return it with bodies as JSON. An answer is there only if it is an error."""
        fields: dict[str, Any] = {
            "method": self.method,
            "path": self.path,
            "headers": dict(self.headers),
            "status": self.status,
            "body": _parsed(self.request),
        }
        return fields if self.status < 400 else {**fields, "answer": _parsed(self.answer)}


class Recorder:
    """A layer of the application that adds each exchange to a list."""

    def __init__(self, app: ASGIApp, exchanges: list[Exchange]) -> None:
        self._app = app
        self._exchanges = exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, and keep it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = scope["query_string"].decode()
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
        exchange = Exchange(scope["method"], scope["path"] + (f"?{query}" if query else ""), kept)
        self._exchanges.append(exchange)

        async def receive_kept() -> Message:
            message = await receive()
            exchange.request += message.get("body", b"")
            return message

        async def send_kept(message: Message) -> None:
            exchange.status = message.get("status", exchange.status)
            exchange.answer += message.get("body", b"")
            await send(message)

        await self._app(scope, receive_kept, send_kept)


def _parsed(body: bytearray) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
