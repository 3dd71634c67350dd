"""Correct answers of a server, recorded once, and the same server with a mistake in each answer."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from moeflow.cli.check.outcome import Result
from moeflow.cli.check.run import choose, open_server, run_checks

Key = tuple[str, str, bytes, str]


class Reply:
    """An answer, with the body of its request."""

    def __init__(self, asked: bytes, status: int, media_type: str, body: bytes) -> None:
        self.asked, self.status, self.media_type, self.body = asked, status, media_type, body

    def request(self) -> dict[str, Any]:
        try:
            return json.loads(self.asked or b"{}")
        except ValueError:
            return {}

    @property
    def is_stream(self) -> bool:
        return self.media_type == "text/event-stream"


Mistake = Callable[[Reply], None]


class Recording(httpx.BaseTransport):
    """Passes requests on and keeps the answers."""

    def __init__(self) -> None:
        self._network = httpx.HTTPTransport()
        self.replies: dict[Key, list[Reply]] = defaultdict(list)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._network.handle_request(request)
        kind = response.headers.get("content-type", "").partition(";")[0]
        reply = Reply(request.content, response.status_code, kind, b"")
        self.replies[key_of(request)].append(reply)
        return httpx.Response(response.status_code, headers=response.headers, stream=_Tee(response, reply))


class _Tee(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response, reply: Reply) -> None:
        self._response, self._reply = response, reply

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._response.stream:
            self._reply.body += piece
            yield piece

    def close(self) -> None:
        self._response.close()


class Replay(httpx.BaseTransport):
    """Answers as recorded, with a mistake in each answer."""

    def __init__(self, replies: dict[Key, list[Reply]], mistake: Mistake) -> None:
        self._replies, self._mistake = replies, mistake
        self._counts: dict[Key, int] = defaultdict(int)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        key = key_of(request)
        known = self._replies.get(key)
        assert known, f"this request was not recorded: {key}"
        first = known[min(self._counts[key], len(known) - 1)]
        self._counts[key] += 1
        reply = Reply(first.asked, first.status, first.media_type, first.body)
        self._mistake(reply)
        return httpx.Response(reply.status, headers={"content-type": reply.media_type}, content=reply.body)


def key_of(request: httpx.Request) -> Key:
    keys = request.headers.get("authorization", "") + request.headers.get("x-api-key", "")
    return request.method, request.url.path, request.read(), keys


def run(
    transport: httpx.BaseTransport, only: str = "*", *, url: str = "http://recorded", key: str = ""
) -> list[Result]:
    """Return the results of some checks."""
    with httpx.Client(transport=transport, base_url=url, timeout=30) as client:
        return list(run_checks(open_server(client, None, key), choose("any", only), "any"))
