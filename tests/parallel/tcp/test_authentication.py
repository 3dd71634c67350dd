"""A client with the token gets in; one without learns nothing, and costs little."""

from __future__ import annotations

import collections
import contextlib
import queue
import socket
import threading
import time

import pytest

from moeflow.core.errors import ConfigError, GroupError
from moeflow.parallel.tcp import connecting, pending_connections
from moeflow.parallel.tcp.authentication import prove, verify
from moeflow.parallel.tcp.connecting import Acceptor, connect, listen
from moeflow.parallel.tcp.tcp_link import TcpLink
from tests.parallel.links import connections, in_thread

TOKEN = b"the token of the tests"
GREETING = b"moeflow ranks 1\n" + bytes(32)
PATIENCE_S = 10.0


def both(token: bytes, other_token: bytes) -> list:
    """Return what each end comes to: keys, or the error."""
    found: list = [None, None]

    def run(idx: int, call, connection: socket.socket, token: bytes) -> None:
        try:
            found[idx] = call(connection, token, PATIENCE_S)
        except (ConfigError, GroupError) as error:
            found[idx] = error

    one, other = connections()
    with one, other:
        thread = in_thread(run, 0, prove, one, token)
        run(1, verify, other, other_token)
        thread.join()
    return found


def test_both_ends_find_the_same_keys_and_others_each_time():
    first, second = both(TOKEN, TOKEN), both(TOKEN, TOKEN)
    for proving, verifying in (first, second):
        assert proving.sending == verifying.receiving
        assert proving.receiving == verifying.sending
        assert proving.sending != proving.receiving
    assert first[0].sending != second[0].sending


def test_another_token_is_refused_and_both_know():
    proving, verifying = both(TOKEN, TOKEN[::-1])
    assert isinstance(proving, ConfigError)
    assert "the token is refused: copy the head's token file" in str(proving)
    assert isinstance(verifying, GroupError)
    assert "does not have the cluster's token" in str(verifying)


@contextlib.contextmanager
def verifying():
    """Yield a socket whose other end authenticates it, and what that comes to."""
    ours, theirs = connections()
    ours.settimeout(PATIENCE_S)
    errors: list[Exception] = []

    def run() -> None:
        with theirs:
            try:
                verify(theirs, TOKEN, 0.5)
            except GroupError as error:
                errors.append(error)

    thread = in_thread(run)
    with ours:
        yield ours, errors
    thread.join()


def test_who_speaks_otherwise_gets_no_answer():
    with verifying() as (ours, errors):
        ours.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(100))
        with contextlib.suppress(ConnectionResetError):
            assert ours.recv(100) == b""
    assert "does not speak the protocol" in str(errors[0])


def test_without_a_proof_nothing_is_proved():
    """The client gets only a nonce and a rejection: nothing to try tokens on."""
    with verifying() as (ours, errors):
        ours.sendall(GREETING)
        nonce = ours.recv(100)
        assert len(nonce) == len(GREETING)
        ours.sendall(bytes(range(32)))
        assert ours.recv(100) == bytes(32)
        assert ours.recv(100) == b""
    assert "does not have the cluster's token" in str(errors[0])


def test_an_end_that_sends_proofs_back_proves_nothing():
    """It has no token, and echoes its input: the other role's proofs differ."""
    ours, theirs = connections()

    def echo() -> None:
        with theirs:
            while data := theirs.recv(100):
                theirs.sendall(data)

    thread = in_thread(echo)
    with ours, pytest.raises(ConfigError, match="does not have the cluster's token"):
        prove(ours, TOKEN, PATIENCE_S)
    thread.join()


def test_bytes_that_drip_do_not_prolong_the_deadline():
    with verifying() as (ours, errors):
        begin_s = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in GREETING * 10:
                ours.sendall(bytes([byte]))
                time.sleep(0.02)
        assert time.monotonic() - begin_s < PATIENCE_S
    assert "does not answer in time" in str(errors[0])


@contextlib.contextmanager
def accepting(arrivals):
    acceptor = Acceptor(listen("127.0.0.1", 0), TOKEN, arrivals.put)
    try:
        yield acceptor.port
    finally:
        acceptor.close()


def test_links_are_made_until_the_acceptor_is_closed():
    arrivals: queue.Queue[TcpLink] = queue.Queue()
    with accepting(arrivals) as port:
        ours = connect("127.0.0.1", port, TOKEN)
        theirs = arrivals.get(timeout=PATIENCE_S)
        ours.send_message("greeting", b"hello", PATIENCE_S)
        assert theirs.receive_message("greeting", PATIENCE_S) == b"hello"
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the token is refused"):
            connect("127.0.0.1", port, TOKEN[::-1])
    with pytest.raises(GroupError, match=f"cannot connect to 127.0.0.1:{port}: Connection refused"):
        connect("127.0.0.1", port, TOKEN)
    for link in (ours, theirs):
        link.close()
    assert arrivals.empty()


def test_connections_that_say_nothing_are_few_and_end_soon(monkeypatch):
    monkeypatch.setattr(connecting, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr(pending_connections, "MAX_WAITING", 3)
    arrivals: queue.Queue[TcpLink] = queue.Queue()
    with accepting(arrivals) as port, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)]
        for connection in silent:
            connection.settimeout(PATIENCE_S)
        assert [connection.recv(1) for connection in silent[:5]] == [b""] * 5, "the oldest leave for the newest"
        assert not any(thread.name == "handshake" for thread in threading.enumerate())
        assert [connection.recv(1) for connection in silent[5:]] == [b""] * 3
        stack.enter_context(contextlib.closing(connect("127.0.0.1", port, TOKEN)))
        arrivals.get(timeout=PATIENCE_S).close()


@pytest.mark.parametrize("sent", [b"", GREETING[:-1], GREETING, b"GET / HTTP/1.1\r\n" * 8], ids=repr)
def test_strangers_who_flood_do_not_keep_a_rank_out(sent):
    """From one address they fill every place, again and again, while a rank at another address joins."""
    arrivals: queue.Queue[TcpLink] = queue.Queue()
    has_ended = threading.Event()

    def flood(port: int) -> None:
        open_ones: collections.deque[socket.socket] = collections.deque()
        while not has_ended.is_set():
            connection = socket.socket()
            connection.bind(("127.0.0.2", 0))
            connection.settimeout(PATIENCE_S)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", port))
                connection.sendall(sent)
            open_ones.append(connection)
            if len(open_ones) > 400:
                open_ones.popleft().close()
        for connection in open_ones:
            connection.close()

    with accepting(arrivals) as port:
        flooding = in_thread(flood, port)
        try:
            for _ in range(5):
                connect("127.0.0.1", port, TOKEN).close()
                link = arrivals.get(timeout=PATIENCE_S)
                assert link.host == "127.0.0.1"
                link.close()
        finally:
            has_ended.set()
            flooding.join()


def test_an_address_of_another_machine_cannot_be_listened_at():
    with pytest.raises(ConfigError, match=r"cannot listen for ranks at 192.0.2.1:9200: .*; name another port, and an"):
        listen("192.0.2.1", 9200)
