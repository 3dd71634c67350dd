"""A client that goes away takes its work with it: real sockets, closed at every stage."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI

from tests.server.fake_client import FakeClient
from tests.server.live_server import eventually, serve_in_thread

BODY = b'{"prompt": "Hello", "max_tokens": 1}'
PROMPTS = ["Hello", ["a", "b", "c"]]


@pytest.fixture
def address(app: FastAPI) -> Iterator[tuple[str, int]]:
    with serve_in_thread(app) as url:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        yield parts.hostname, parts.port


def request(body: bytes, length: int | None = None) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def ask(address: tuple[str, int], body: bytes, *, length: int | None = None) -> socket.socket:
    """Send a request and leave the answer to be read."""
    connection = socket.create_connection(address, timeout=5)
    connection.sendall(request(body, length))
    return connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        piece = connection.recv(65536)
        assert piece, f"the server closed the connection after {received!r}"
        received += piece
    return received


def is_idle(engine: FakeClient, app: FastAPI) -> Callable[[], bool]:
    return lambda: not engine.live and app.state.service.models.num_unfinished == 0


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_after", [0, 3])
def test_leaving_cancels_the_work(address, engine, app, prompt, stream, pause_after):
    engine.pause_after = pause_after
    num_sequences = 1 if isinstance(prompt, str) else len(prompt)
    body = json.dumps({"prompt": prompt, "max_tokens": 100, "stream": stream}).encode()
    connection = ask(address, body)
    assert eventually(lambda: len(engine.live) == num_sequences)
    if stream and pause_after:
        read_until(connection, b"data: ")
    assert app.state.service.models.num_unfinished == num_sequences
    connection.close()
    assert eventually(is_idle(engine, app))
    assert len(engine.cancelled) == num_sequences


def test_leaving_abruptly_cancels_too(address, engine, app):
    engine.pause_after = 3
    connection = ask(address, b'{"prompt": "Hello", "stream": true, "max_tokens": 100}')
    assert eventually(lambda: len(engine.live) == 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close() then resets
    connection.close()
    assert eventually(is_idle(engine, app))
    assert len(engine.cancelled) == 1


def test_leaving_in_the_middle_of_a_body_starts_nothing(address, engine, app):
    connection = ask(address, b'{"prompt": "Hel', length=100)
    connection.close()
    with ask(address, b'{"prompt": "Hello"}') as later:
        assert b"200 OK" in read_until(later, b"total_tokens")
    assert len(engine.submissions) == 1
    assert eventually(is_idle(engine, app))


def test_text_arrives_before_the_answer_is_complete(address, engine):
    engine.pause_after = 2
    with ask(address, b'{"prompt": "Hello", "stream": true, "max_tokens": 100}') as connection:
        read_until(connection, b'"text":"r"')
        assert engine.live
        engine.pause_after = None
        read_until(connection, b"data: [DONE]")


def test_a_connection_serves_one_request_after_another(address, engine):
    with ask(address, BODY) as connection:
        for number in range(1, 4):
            read_until(connection, b"total_tokens")
            assert len(engine.submissions) == number
            connection.sendall(request(BODY))


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(address, engine):
    with ask(address, b'{"prompt": "', length=10**12) as connection:
        assert b" 413 " in connection.recv(65536)
    assert not engine.submissions
