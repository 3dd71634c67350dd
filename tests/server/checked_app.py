"""Holds every answer of an application against the official clients' types, for all tests.

Servers and clients of tests get it in the place of the application. It passes all messages on unchanged.
"""

from __future__ import annotations

import json
import traceback

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeflow.server.paths import api_path
from moeflow.server.piece_writer import WRITER, WritePiece
from tests.server.official_types import check_answer, check_error, check_event
from tests.server.stream_order import order_of

STARTS = ("data: ", "event: ", ":")


class CheckedApp:
    """The application, and the problems of its answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.problems: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = CheckedAnswer(scope)

        async def send_checked(message: Message, write: WritePiece | None = None) -> None:
            try:
                answer.take(message)
            except Exception:
                self.problems.append(f"{answer.name}: {traceback.format_exc()}")
            await (send(message) if write is None else write(message["body"]))

        if (write := scope.get(WRITER)) is not None:

            async def write_checked(piece: bytes) -> None:
                await send_checked({"type": "http.response.body", "body": piece, "more_body": True}, write)

            scope[WRITER] = write_checked
        await self._app(scope, receive, send_checked)

    def require_no_problems(self) -> None:
        """Raise if any answer so far was not as it has to be."""
        assert not self.problems, self.problems[0]


class CheckedAnswer:
    """One answer on its way."""

    def __init__(self, scope: Scope) -> None:
        self.name = f"{scope.get('method')} {scope.get('path')}"
        self._scope = scope
        self._path = ""
        self._status = 0
        self._media_type = b""
        self._body = bytearray()

    def take(self, message: Message) -> None:
        """Raise if the path's clients would not expect this message."""
        if message["type"] == "http.response.start":
            self._path = api_path(self._scope).rstrip("/")
            self._status = message["status"]
            headers = {name.lower(): value for name, value in message["headers"]}
            self._media_type = headers.get(b"content-type", b"").partition(b";")[0]
            self._order = order_of(self._path)
        elif message["type"] == "http.response.body" and self._path.startswith("/v1/"):
            self._body += message.get("body", b"")
            is_last = not message.get("more_body", False)
            if self._media_type == b"text/event-stream":
                self._take_events(is_last=is_last)
            elif self._media_type == b"application/json" and is_last:
                self._take_whole()

    def _take_whole(self) -> None:
        if self._status == 200:
            check_answer(self._scope["method"], self._path, bytes(self._body))
        else:
            check_error(self._path, bytes(self._body))

    def _take_events(self, *, is_last: bool) -> None:
        *events, rest = self._body.split(b"\n\n")
        self._body = bytearray(rest)
        for event in events:
            self._take_event(event.decode())
        if is_last:
            assert not rest, "the last event is whole"
            self._order.end()

    def _take_event(self, event: str) -> None:
        fields = event.splitlines()
        assert fields, "no event is empty"
        assert all(line.startswith(STARTS) for line in fields), f"an event of broken lines: {event!r}"
        data = [line.removeprefix("data: ") for line in fields if line.startswith("data: ")]
        if not data:
            assert len(fields) == 1
            assert fields[0].startswith(":")
        elif data == ["[DONE]"]:
            self._order.take_done()
        else:
            (encoded,) = data
            decoded = json.loads(encoded)
            names = [line.removeprefix("event: ") for line in fields if line.startswith("event: ")]
            assert names == ([decoded["type"]] if "type" in decoded else [])
            check_event(self._path, decoded, encoded.encode())
            self._order.take(decoded)
