"""The server under test, as one check sees it: requests go out, and each is kept to reproduce a failure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, TypeVar

import httpx
import msgspec

from moeflow.cli.check.outcome import Failed, Refused, expect
from moeflow.cli.check.sse import Event, parse_events

Shape = TypeVar("Shape")
Body = Mapping[str, Any]
REFUSALS = (400, 404, 405, 422, 501)
ABSENT = (404, 405, 501)
KEY_VARIABLE = "MOEFLOW_API_KEY"
ANTHROPIC_VERSION = "2023-06-01"
_MAX_SHOWN = 2000  # characters of a body in a command


class Answer(msgspec.Struct):
    """A whole answer."""

    status: int
    media_type: str
    body: bytes

    def read(self, shape: type[Shape]) -> Shape:
        """Return the body. Raises: Failed if it has another shape."""
        expect(self.media_type == "application/json", f"the answer must be application/json, not {self.media_type!r}")
        try:
            return msgspec.json.decode(self.body, type=shape)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Failed(f"{error}: {self.shown()}") from None

    def shown(self) -> str:
        """Return status and start of the body, for a message."""
        return f"{self.status} {self.body[:200].decode(errors='replace')}"


class Request(msgspec.Struct, frozen=True):
    """A request that was sent."""

    method: str
    url: str
    body: bytes
    headers: dict[str, str]  # without the key
    key_header: str  # with a place for the key; empty: there is none

    def curl(self) -> str:
        """Return the command that sends it again. It takes the key from the environment."""
        words = ["curl", "-sN", "-X", self.method, self.url]
        for name, value in self.headers.items():
            words += ["-H", f"{name}: {value}"]
        text = self.body.decode(errors="replace")
        if len(text) > _MAX_SHOWN:
            text = f"{text[:200]}... ({len(self.body)} bytes)"
        key = f' -H "{self.key_header}"'.format(f"${KEY_VARIABLE}") if self.key_header else ""
        return shlex.join([*words, *(["-d", text] if text else [])]) + key


class Shared(msgspec.Struct):
    """Everything that all checks of a run share."""

    client: httpx.Client
    model: str
    api_key: str | None = None
    max_model_len: int | None = None
    answers: dict[tuple[str, str, bytes], Answer] = msgspec.field(default_factory=dict)  # which may serve again


class Target:
    """Sends requests for one check."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.model = shared.model
        self.max_model_len = shared.max_model_len
        self.requests: list[Request] = []

    def get(self, path: str) -> Answer:
        """Return the answer of a GET, whatever its status."""
        return self.send("GET", path)

    def post(self, path: str, body: Body, *, again: bool = False) -> Answer:
        """Return the answer of a POST, whatever its status. `again`: send it even if another check did."""
        return self.send("POST", path, _encode(body), again=again)

    def ask(self, path: str, body: Body, shape: type[Shape], *, again: bool = False) -> Shape:
        """Return a successful answer. Raises: Refused or Failed."""
        answer = self.post(path, body, again=again)
        _require_ok(answer)
        return answer.read(shape)

    def stream(self, path: str, body: Body, *, again: bool = False) -> list[Event]:
        """Return the events of a successful stream. Raises: Refused or Failed."""
        answer = self.post(path, {**body, "stream": True}, again=again)
        _require_ok(answer)
        expect(answer.media_type == "text/event-stream", f"a stream must be text/event-stream: {answer.media_type!r}")
        return parse_events(answer.body)

    def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        again: bool = False,
    ) -> Answer:
        """Return the answer of any request. An answer that is known already is not asked for again."""
        request = self._keep(method, path, body, headers or {})
        known = None if again or headers else self._shared.answers.get((method, path, body))
        if known is None:
            response = self._shared.client.request(method, path, content=body, headers=self._headers(request))
            media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            known = Answer(response.status_code, media_type, response.content)
        if not headers:
            self._shared.answers.setdefault((method, path, body), known)
        return known

    def read_one_event_and_leave(self, path: str, body: Body) -> None:
        """Close a stream after its first bytes."""
        request = self._keep("POST", path, _encode({**body, "stream": True}), {})
        with self._shared.client.stream("POST", path, content=request.body, headers=self._headers(request)) as response:
            next(response.iter_bytes(), b"")

    def _keep(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Request:
        fields = {"Content-Type": "application/json"} if body else {}
        if path.startswith("/v1/messages"):
            fields["anthropic-version"] = ANTHROPIC_VERSION
        client = self._shared.client
        request = Request(
            method,
            str(client.base_url).rstrip("/") + path,
            body,
            {**fields, **headers},
            key_header=_key_header(path) if self._shared.api_key and not headers else "",
        )
        self.requests.append(request)
        return request

    def _headers(self, request: Request) -> list[tuple[bytes, bytes]]:
        """Return all headers; a key may be any text, as UTF-8. Threads that share a client lose sockets of connections
        that stay open.
        """
        name, _, value = request.key_header.format(self._shared.api_key).partition(": ")
        pairs = [*request.headers.items(), *([(name, value)] if name else [])]
        return [(b"Connection", b"close"), *((name.encode(), value.encode()) for name, value in pairs)]


def _key_header(path: str) -> str:
    return "x-api-key: {}" if path.startswith("/v1/messages") else "Authorization: Bearer {}"


def _encode(body: Body) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def _require_ok(answer: Answer) -> None:
    """Raise: Refused or Failed unless the status is 200."""
    if answer.status in REFUSALS:
        raise Refused(f"refused with {answer.shown()}")
    expect(answer.status == 200, f"the status must be 200, not {answer.shown()}")
