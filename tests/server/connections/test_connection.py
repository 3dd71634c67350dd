"""Connections as attackers and broken clients use them: too slow, never reading, not speaking HTTP."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from moeflow.server.connection import Patience
from tests.server.live_server import eventually, serve_in_thread

SHORT = Patience(patience_s=0.4, bytes_per_s=100_000.0, stall_s=0.4)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "Hello", "max_tokens": 1}'
HANG_S = 20


@pytest.fixture
def address(app: FastAPI) -> Iterator[tuple[str, int]]:
    with serve_in_thread(app, SHORT) as url:
        parts = urlsplit(url)
        yield parts.hostname, parts.port


def send(address: tuple[str, int], data: bytes) -> socket.socket:
    connection = socket.create_connection(address, timeout=HANG_S)
    connection.sendall(data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    return received


def answer(received: bytes) -> tuple[int, dict[str, str], dict]:
    """Return status, headers and error of one answer."""
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(status.split()[1]), headers, error


def refusals(app: FastAPI, code: str) -> int:
    text = app.state.service.metrics.exposition().decode()
    lines = [line for line in text.splitlines() if f'reason="{code}"' in line and "_total" in line]
    return int(float(lines[0].split()[-1])) if lines else 0


@pytest.mark.parametrize(
    "begun",
    [
        b"G",
        HEAD,
        HEAD + b"Content-Length: 1000\r\n\r\n",
        HEAD + b"Content-Length: 1000\r\n\r\n" + BODY,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
    ],
)
def test_a_request_that_does_not_go_on_is_answered_and_closed(address, app, begun):
    with send(address, begun) as connection:
        status, headers, error = answer(read_all(connection))
    assert (status, error["code"]) == (408, "request_timeout")
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["x-request-id"].startswith("req_")
    assert refusals(app, "request_timeout") == 1
    assert app.state.service.models.num_unfinished == 0


def test_a_connection_that_asks_nothing_is_closed_without_a_word(address):
    with send(address, b"") as connection:
        assert read_all(connection) == b""


def test_a_trickle_is_no_way_around(address):
    """A byte now and then keeps no connection open: the time for a whole request is limited, not that for a byte."""
    with send(address, HEAD + b"X-Slow: ") as connection:
        with contextlib.suppress(OSError):
            for _ in range(int(HANG_S / 0.05)):
                connection.sendall(b"x")
                time.sleep(0.05)
        assert answer(read_all(connection))[0] == 408


def test_the_next_request_of_a_connection_has_its_own_time(address):
    with send(address, HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY) as connection:
        assert b" 200 " in connection.recv(65536)
        connection.sendall(HEAD)
        assert b"HTTP/1.1 408 " in read_all(connection)


def test_a_long_answer_is_not_cut_off(address, engine):
    """Only clients are hurried: the model may take its time."""
    engine.pause_after = 0
    with send(address, HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY) as connection:
        assert eventually(lambda: len(engine.live) == 1)
        time.sleep(3 * SHORT.patience_s)
        engine.pause_after = None
        assert b" 200 " in connection.recv(65536)


def test_a_body_that_comes_steadily_may_take_long(app):
    """More bytes, more time: three times the patience for a body at the least speed."""
    patience = Patience(patience_s=0.4, bytes_per_s=1000.0, stall_s=10.0)
    body = b'{"prompt": "Hello", "max_tokens": 1' + b" " * 2400 + b"}"
    with serve_in_thread(app, patience) as url:
        parts = urlsplit(url)
        with send((parts.hostname, parts.port), HEAD + b"Content-Length: %d\r\n\r\n" % len(body)) as connection:
            for start in range(0, len(body), 200):
                connection.sendall(body[start : start + 200])
                time.sleep(0.1)
            assert b" 200 " in connection.recv(65536)


@pytest.mark.slow
def test_hundreds_of_slow_clients_go_and_hold_nobody_up_meanwhile(address, app):
    begun = [b"", b"GET / HTT", HEAD, HEAD + b"Content-Length: 999\r\n\r\n{"]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(send(address, begun[number % 4])) for number in range(300)]
        url = "http://{}:{}/v1/completions".format(*address)
        assert httpx.post(url, json={"prompt": "Hello", "max_tokens": 1}).status_code == 200
        answers = [read_all(connection) for connection in connections]
    assert sum(b" 408 " in received[:20] for received in answers) == 225
    assert refusals(app, "request_timeout") == 225


def test_a_client_that_stops_reading_is_given_up(address, engine, app):
    engine.reply = engine.reply[:1] * 500_000  # far more than sockets buffer
    engine.model = msgspec.structs.replace(engine.model, max_model_len=1_000_000)
    body = b'{"prompt": "Hello", "stream": true, "max_tokens": 400000}'
    with send(address, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body):
        assert eventually(lambda: len(engine.live) == 1)
        assert eventually(lambda: bool(engine.cancelled), HANG_S)
        assert eventually(lambda: not engine.live and app.state.service.models.num_unfinished == 0)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000, 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),  # the endpoint is at work already
    ],
)
def test_what_is_not_http_gets_an_error_object(address, app, sent, status):
    with send(address, sent) as connection:
        got, headers, error = answer(read_all(connection))
    assert (got, error["code"], error["type"]) == (
        status,
        "invalid_http",
        "invalid_request_error" if status < 500 else "server_error",
    )
    assert headers["x-request-id"]
    assert "bytearray" not in error["message"]
    assert refusals(app, "invalid_http") == 1
    assert eventually(lambda: app.state.service.models.num_unfinished == 0)


def test_nonsense_after_a_request_does_not_disturb_its_answer(address, engine):
    """Bytes that are not HTTP come after a stream has begun: its connection is closed, its work ends."""
    body = b'{"prompt": "Hello", "stream": true}'
    engine.pause_after = 2
    with send(address, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"nonsense\r\n\r\n") as connection:
        assert b"200 OK" in connection.recv(65536)
        engine.pause_after = None
        assert b"[DONE]" in read_all(connection)
