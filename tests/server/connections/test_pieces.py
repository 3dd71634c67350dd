"""Bodies of streams, byte by byte: chunks for HTTP/1.1, plain bytes for HTTP/1.0, and the connection's next request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import h11
import pytest
from fastapi import FastAPI

from tests.server.fake_client import REPLY
from tests.server.live_server import serve_in_thread

BODY = b'{"prompt": "Hello", "max_tokens": 64, "stream": true}'
HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@pytest.fixture
def connection(app: FastAPI) -> Iterator[socket.socket]:
    with serve_in_thread(app) as url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), timeout=20) as connected:
            yield connected


def next_body(connection: socket.socket, parser: h11.Connection) -> bytes:
    """Send a request, and return the next answer's body, as an independent parser of HTTP reads it."""
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + HEADERS)
    connection.sendall(BODY)
    parser.send(h11.Request(method="POST", target="/", headers=[("Host", "localhost")]))
    parser.send(h11.EndOfMessage())
    body = b""
    while not isinstance(event := parser.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            parser.receive_data(connection.recv(65536))
        elif isinstance(event, h11.Data):
            body += event.data
    parser.start_next_cycle()
    return body


def texts(body: bytes) -> str:
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    return "".join(piece["choices"][0]["text"] for piece in pieces)


def test_a_connection_streams_one_answer_after_another(connection):
    parser = h11.Connection(h11.CLIENT)
    assert [texts(next_body(connection, parser)) for _ in range(3)] == [REPLY] * 3


def test_a_client_of_http_1_0_gets_no_chunks(connection):
    connection.sendall(b"POST /v1/completions HTTP/1.0\r\n" + HEADERS + BODY)
    received = b""
    while piece := connection.recv(65536):
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert texts(body) == REPLY
