"""More connections than a server has descriptors for: silent ones leave, busy ones stay, and the server answers."""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.server import open_connections
from moeflow.server.config import ServerConfig
from moeflow.server.listener import listen
from moeflow.server.open_connections import OpenConnections, max_connections, raise_descriptor_limit
from tests.server.connections.test_connection import read_all, refusals
from tests.server.live_server import eventually, serve_in_thread
from tests.server.test_proxies import TLS

LIMIT = 16


class Fake:
    def __init__(self, address: str | None, silent_since_s: float | None) -> None:
        self.address, self.silent_since_s = address, silent_since_s
        self.end: str | None = None

    def close_silently(self) -> None:
        assert self.silent_since_s is not None
        self.end = "closed"

    def refuse(self) -> None:
        self.end = "refused"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.none() | st.integers(0, 20)), min_size=1, max_size=40))
def test_the_limit_holds_whatever_the_connections_do(kinds):
    limit = OpenConnections(LIMIT, clock=lambda: 0.0)
    connections: list[Fake] = []
    for address, since_s in kinds:
        new = Fake(address, since_s)
        connections.append(new)
        limit.admit(new, connections)
        assert new.end != "closed", "nobody leaves for himself"
        if new.end == "refused":
            assert all(one.silent_since_s is None for one in connections if one is not new)
        connections = [one for one in connections if one.end is None]
        assert len(connections) <= LIMIT


def test_first_go_the_silent_ones_of_the_address_that_has_most():
    crowd = [Fake("many", since_s) for since_s in (3, 1, 2, None)] + [Fake("few", 0), Fake(None, 0)]
    new = Fake("few", 9)
    OpenConnections(len(crowd)).admit(new, [*crowd, new])
    assert [one.end for one in crowd] == [None, "closed", None, None, None, None]


def test_one_line_a_minute(caplog):
    times_s = iter((0.0, 1.0, 59.0, 61.0))
    limit = OpenConnections(1, clock=lambda: next(times_s))
    for _ in range(4):
        limit.admit(Fake("a", 1), [Fake("a", 0), Fake("a", 1)])
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition("closed ")[2].partition(" ")[0] for message in messages] == ["1", "3"]


def test_connections_leave_descriptors_for_the_rest(monkeypatch):
    assert max_connections(1024) == 1024 - 256 - 8 * open_connections.ACCEPTED_AT_ONCE
    assert max_connections(100_000) == open_connections.MAX_CONNECTIONS
    assert max_connections(10) == 1
    assert max_connections(2048, num_ports=2) == (2048 - 256) // 2 - 8 * open_connections.ACCEPTED_AT_ONCE
    asked = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: asked.append(new))
    for limits, expected in (
        ((1024, 4096), 4096),
        ((1024, 524_288), 65_536),
        ((1024, resource.RLIM_INFINITY), 65_536),
        ((100_000, 524_288), 100_000),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 65_536),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert raise_descriptor_limit() == expected
    assert [soft for soft, _ in asked] == [4096, 65_536, 65_536]


@pytest.fixture
def connect():
    """Open connections to a server, and close them in the end."""
    with contextlib.ExitStack() as opened:

        def connect(url: str, receive_bytes: int | None = None) -> socket.socket:
            parts = urlsplit(url)
            connection = opened.enter_context(socket.socket())
            connection.settimeout(20)
            if receive_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.connect((parts.hostname, parts.port))
            return connection

        yield connect


class TlsClient:
    """Sends its first data along with the end of the handshake."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=TLS / "first.pem")
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")
        self._call(self._tls.do_handshake)

    def send(self, data: bytes) -> None:
        self._tls.write(data)
        self._connection.sendall(self._outgoing.read())

    def read(self) -> bytes:
        return self._call(self._tls.read)

    def close(self) -> None:
        self._connection.close()

    def _call(self, function):
        while True:
            try:
                return function()
            except ssl.SSLWantReadError:
                self._connection.sendall(self._outgoing.read())
                self._incoming.write(self._connection.recv(65536))


def request_of(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body


def is_open_now(connection: socket.socket) -> bool:
    """Whether the server still holds its end: it takes bytes."""
    try:
        connection.send(b"x")
    except OSError:
        return False
    return True


def test_a_server_full_of_silent_connections_answers(app, connect):
    with serve_in_thread(app, max_connections=LIMIT) as url:
        silent = [connect(url) for _ in range(5 * LIMIT)]
        for begun in silent[-LIMIT:]:
            begun.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: lo")
        for _ in range(2 * LIMIT):
            assert httpx.get(f"{url}/health").status_code == 200
        assert silent[0].recv(1) == b"", "the first is closed"


def test_answers_under_way_are_not_cut_for_new_connections(app, engine, connect):
    """Not even where nothing else could leave: then the new connection is refused."""
    request = request_of(b'{"prompt": "Hello", "max_tokens": 3}')
    engine.pause_after = 1
    with serve_in_thread(app, max_connections=4) as url:
        busy = [connect(url) for _ in range(4)]
        for connection in busy:
            connection.sendall(request)
        assert eventually(lambda: len(engine.submissions) == 4)
        try:
            refused = httpx.get(f"{url}/health")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
            assert refusals(app, "too_many_connections") == 1
        finally:
            engine.pause_after = None
        for connection in busy:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_refused_connections_do_not_add_up(app, engine, connect):
    """Each has a second to read its answer, and closes earlier for the next one."""
    engine.pause_after = 1
    with serve_in_thread(app, max_connections=1) as url:
        busy = connect(url)
        busy.sendall(request_of(b'{"prompt": "Hello", "max_tokens": 3}'))
        assert eventually(lambda: engine.submissions)
        try:
            refused = [connect(url) for _ in range(20)]
            for connection in refused:
                assert read_all(connection).startswith(b"HTTP/1.1 503")
            refused[-1].sendall(b"GET /health HTTP/1.1\r\n\r\n")  # which is not answered any more
            assert refused[-1].recv(1) == b""
            assert eventually(lambda: sum(map(is_open_now, refused)) <= 1)
        finally:
            engine.pause_after = None


def test_connections_that_close_count_until_their_answer_is_read(app, connect):
    """Else clients that read nothing could take all descriptors."""
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    servers = []
    listener = listen(ServerConfig(port=0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # as over a network; loopback's takes megabytes
    with serve_in_thread(app, max_connections=LIMIT, listener=listener, on_start=servers.append) as url:
        connections = servers[0].server_state.connections
        unread = [connect(url, receive_bytes=4096) for _ in range(LIMIT)]
        for connection in unread:
            connection.sendall(request)
        assert eventually(lambda: sum(one.transport.is_closing() for one in connections) == LIMIT)
        assert httpx.get(f"{url}/health").status_code == 503
        unread.pop().close()
        assert eventually(lambda: len(connections) < LIMIT)
        assert httpx.get(f"{url}/health").status_code == 200
        for connection in unread:
            connection.close()


def test_a_request_on_a_refused_connection_is_ignored(make_app, engine, connect, caplog):
    """With TLS, a request may come along with the end of the handshake, behind the refusal."""
    app = make_app(tls_cert=TLS / "first.pem", tls_key=TLS / "first.key")
    request = request_of(b'{"prompt": "Hello", "max_tokens": 3}')
    engine.pause_after = 1
    with serve_in_thread(app, max_connections=1) as url:
        busy = TlsClient(connect(url))
        busy.send(request)
        assert eventually(lambda: engine.submissions)
        refused = TlsClient(connect(url))
        refused.send(request)
        assert refused.read().startswith(b"HTTP/1.1 503 ")
        engine.pause_after = None
        assert busy.read().startswith(b"HTTP/1.1 200 ")
        for client in busy, refused:
            client.close()
    assert len(engine.submissions) == 1
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_handshakes_that_do_not_end_count(make_app, connect):
    app = make_app(tls_cert=TLS / "first.pem", tls_key=TLS / "first.key")
    with serve_in_thread(app, max_connections=LIMIT) as url:
        silent = [connect(url) for _ in range(5 * LIMIT)]
        assert silent[0].recv(1) == b"", "the first is closed"
        client = TlsClient(connect(url))
        client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert client.read().startswith(b"HTTP/1.1 200 ")
        client.close()
        for connection in silent:
            connection.settimeout(0.1)
        open_ones = [connection for connection in silent if is_open(connection)]
        assert 0 < len(open_ones) <= LIMIT


def is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False
