"""A process with the token gets in, and all is encrypted. One without learns nothing, and costs little."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import random
import signal
import socket
import threading
import time
from contextlib import closing

import pytest

from moeflow.cli.chaos.proxy import Proxy
from moeflow.core.errors import ConfigError, GroupError
from moeflow.parallel.tcp import connection_watch, pending_connections
from moeflow.parallel.tcp import endpoint as endpoint_module
from moeflow.parallel.tcp.curve_keys import CurveKeys
from moeflow.parallel.tcp.endpoint import Endpoint, connect
from moeflow.parallel.tcp.link import Link
from tests.forked import forked_context
from tests.parallel.links import PATIENCE_S, TOKEN, connected, in_thread, listening

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47)
HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(192)  # a stranger's: its box is not made with the accepting end's key


def test_keys_are_those_of_the_token_and_of_the_role():
    one, again, other = CurveKeys.of(TOKEN), CurveKeys.of(TOKEN), CurveKeys.of(TOKEN[::-1])
    assert one == again
    found = [
        key for keys in (one, other) for pair in (keys.accepting, keys.connecting) for key in (pair.public, pair.secret)
    ]
    assert len(set(found)) == 8


def test_links_are_made_until_the_endpoint_is_closed():
    with listening() as (port, next_link), connected(port) as ours:
        theirs = next_link()
        ours.send_message("greeting", b"hello")
        assert theirs.receive_message("greeting", PATIENCE_S) == b"hello"
        assert theirs.host == "127.0.0.1"
    with pytest.raises(GroupError, match=f"cannot connect to 127.0.0.1:{port}: Connection refused"), connected(port):
        pass


def test_messages_from_before_a_link_is_made_come_before_later_ones(monkeypatch):
    begin, connections = Endpoint.begin, []

    def slow_begin(self, firsts):
        if firsts:
            while len(connections) < 1:
                time.sleep(0.001)
            connections[0].send_message("number", b"1")
            time.sleep(0.1)
            self.receive()
        begin(self, firsts)
        if firsts:
            connections[0].send_message("number", b"2")
            time.sleep(0.1)
            self.receive()

    monkeypatch.setattr(Endpoint, "begin", slow_begin)
    with listening() as (port, next_link), connected(port) as ours:
        ours.send_message("number", b"0")
        connections.append(ours)
        theirs = next_link()
        assert [theirs.receive_message("number", PATIENCE_S) for _ in range(3)] == [b"0", b"1", b"2"]


def test_messages_before_the_end_of_a_connection_arrive(monkeypatch):
    with listening() as (port, next_link), connected(port) as ours:
        theirs = next_link()
        monkeypatch.setattr(theirs.endpoint, "first_messages", list)  # the watching thread reads only events
        ours.send_message("last words", b"hello")
        ours.say_farewell("the disk is full")
        time.sleep(0.1)
        (descriptor,) = ours.endpoint._connections
        connection_watch.hang_up(descriptor, ours.endpoint._connections[descriptor][0])
        deadline_s = time.monotonic() + PATIENCE_S
        while theirs.endpoint._connections:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert theirs.receive_message("last words", PATIENCE_S) == b"hello"
        with pytest.raises(GroupError, match="the disk is full"):
            theirs.receive_message("more", PATIENCE_S)


def test_another_token_is_refused_and_both_know(caplog):
    with listening() as (port, next_link):
        complaint = f"127.0.0.1:{port}: the token is refused: copy the head's token file"
        with pytest.raises(ConfigError, match=complaint), connected(port, TOKEN[::-1]):
            pass
        with connected(port):
            next_link()
    assert "does not have the cluster's token" in caplog.text


def test_the_public_key_of_the_accepting_end_is_not_enough(monkeypatch):
    """The secret key of a connecting end comes from the token."""
    found = CurveKeys(CurveKeys.of(TOKEN).accepting, CurveKeys.of(TOKEN[::-1]).connecting)
    with listening() as (port, _):
        monkeypatch.setattr(endpoint_module.CurveKeys, "of", lambda _: found)
        with pytest.raises(ConfigError, match="the token is refused"), connected(port):
            pass


def test_nothing_that_is_sent_can_be_read_on_the_way():
    with listening() as (port, next_link), closing(Recorder(port)) as recorder, connected(recorder.port) as ours:
        theirs = next_link()
        ours.send_message("a name of a message", b"secret prompt" * 100)
        assert theirs.receive_message("a name of a message", PATIENCE_S) == b"secret prompt" * 100
        theirs.send_message("another name", b"secret answer" * 100)
        assert ours.receive_message("another name", PATIENCE_S) == b"secret answer" * 100
        recorded = b"".join(recorder.recorded)
    assert len(recorded) > 2600
    for word in (b"secret", b"prompt", b"answer", b"name", TOKEN):
        assert word not in recorded


class Recorder(Proxy):
    """A proxy that keeps the forwarded bytes."""

    def __init__(self, port: int) -> None:
        self.recorded: list[bytes] = []
        super().__init__(port)

    def passing(self, data: bytes) -> bytes:
        self.recorded.append(data)
        return data


class Meddler(Proxy):
    """A proxy that changes one bit of the forwarded bytes, from some time on."""

    meddles = False

    def passing(self, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if self.meddles else data


def test_bytes_that_are_changed_on_the_way_end_the_link():
    with listening() as (port, next_link), closing(Meddler(port)) as meddler, connected(meddler.port) as ours:
        theirs = next_link()
        ours.send_message("greeting", b"hello")
        assert theirs.receive_message("greeting", PATIENCE_S) == b"hello"
        meddler.meddles = True
        ours.send_message("greeting", b"good morning")
        with pytest.raises(GroupError, match="is gone"):
            theirs.receive_message("greeting", PATIENCE_S)


@pytest.mark.parametrize(
    ("sent", "error", "complaint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10, ConfigError, "what answers there is no moeflow"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ConfigError, "what answers there is no moeflow"),
        (b"", GroupError, "closed the connection before it was authenticated"),
    ],
)
def test_what_answers_otherwise_is_told(sent, error, complaint):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(sent)
                        connection.shutdown(socket.SHUT_WR)
                        connection.settimeout(PATIENCE_S)
                        while connection.recv(100):
                            pass

        thread = in_thread(answer)
        with pytest.raises(error, match=f"127.0.0.1:{port}: .*{complaint}"), connected(port):
            pass
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_who_does_not_answer_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(endpoint_module, "HANDSHAKE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with (
            pytest.raises(GroupError, match=f"127.0.0.1:{port}: authentication does not answer in time"),
            connected(port),
        ):
            pass


def test_connections_that_say_nothing_are_few_and_end_soon(monkeypatch, caplog):
    monkeypatch.setattr(endpoint_module, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr(pending_connections, "MAX_WAITING", 3)
    with listening() as (port, next_link), contextlib.ExitStack() as stack:
        silent = []
        for _ in range(8):
            silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            silent[-1].settimeout(PATIENCE_S)
        assert [ends(connection) for connection in silent] == [True] * 8
        with connected(port):
            next_link()
    assert "is refused: authentication does not answer in time" in caplog.text


def ends(connection: socket.socket) -> bool:
    """Return whether the other end closes the connection, after its greeting."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(100):
            pass
    return True


@pytest.mark.parametrize("sent", [b"", GREETING[:-1], GREETING, GREETING + HELLO, b"GET / HTTP/1.1\r\n" * 8], ids=repr)
def test_strangers_who_flood_do_not_keep_a_rank_out(sent):
    """From one address they fill every place, again and again, while a rank at another address joins."""
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

    with listening() as (port, next_link):
        flooding = in_thread(flood, port)
        try:
            for _ in range(5):
                with connected(port):
                    assert next_link().host == "127.0.0.1"
        finally:
            has_ended.set()
            flooding.join()


def test_strangers_hold_no_more_connections_than_allowed(monkeypatch):
    monkeypatch.setattr(endpoint_module, "HANDSHAKE_S", 10 * PATIENCE_S)
    monkeypatch.setattr(pending_connections, "MAX_WAITING", 20)
    before = len(os.listdir("/proc/self/fd"))
    with listening() as (port, next_link), contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        with connected(port):
            next_link()
            num_own = 100  # ends of the strangers, in this process
            deadline_s = time.monotonic() + PATIENCE_S
            while len(os.listdir("/proc/self/fd")) - before - num_own > 20 + 40:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)


def test_an_address_of_another_machine_cannot_be_listened_at():
    with (
        closing(Endpoint(TOKEN)) as endpoint,
        pytest.raises(ConfigError, match=r"cannot listen for ranks at 192.0.2.1:9200: .*; name another port, and an"),
    ):
        endpoint.listen("192.0.2.1", 9200, lambda link: None)


def _connect_and_wait(port: int) -> None:
    with connected(port) as link:
        link.send_message("here", b"")
        time.sleep(PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_process_is_noticed_without_any_message(number, monkeypatch):
    monkeypatch.setattr(endpoint_module, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(endpoint_module, "SILENCE_S", 0.4)
    with listening() as (port, next_link):
        process = forked_context().Process(target=_connect_and_wait, args=(port,), daemon=True)
        process.start()
        link = next_link()
        link.receive_message("here", PATIENCE_S)
        assert process.pid is not None
        os.kill(process.pid, number)
        with pytest.raises(GroupError, match="is gone: its process has ended or is stopped, or the network"):
            link.receive_message("never", PATIENCE_S)
        process.kill()
        process.join()


def test_a_process_that_only_computes_is_not_taken_for_stopped(monkeypatch):
    """Heartbeats are answered by a thread of ZeroMQ, whatever Python does."""
    monkeypatch.setattr(endpoint_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(endpoint_module, "SILENCE_S", 5.0)
    with listening() as (port, next_link), connected(port) as ours:
        theirs = next_link()
        for _ in range(30):
            time.sleep(0.02)  # no thread waits for messages
        ours.send_message("still here", b"")
        assert theirs.receive_message("still here", PATIENCE_S) == b""


def _close_in_all_ways(seed: int) -> None:
    chance = random.Random(seed)
    endpoint_module.HEARTBEAT_S = 0.01  # two hundred times as often as usual
    for _ in range(60):
        arrivals: queue.Queue[Link] = queue.Queue()
        accepting = Endpoint(TOKEN)
        proxy = Proxy(accepting.listen("127.0.0.1", 0, arrivals.put))
        ours = connect("127.0.0.1", proxy.port, TOKEN)
        theirs = arrivals.get(timeout=PATIENCE_S)
        for link in (ours, theirs):
            link.send_message("rows", bytes(chance.choice([0, 100, 1 << 20, 16 << 20])))
        closing_both = [in_thread(endpoint.close) for endpoint in (ours.endpoint, accepting)]
        time.sleep(chance.random() * 0.02)
        proxy.close()
        for thread in closing_both:
            thread.join()


@pytest.mark.slow
@pytest.mark.thorough
def test_no_heartbeat_aborts_a_process_that_closes_while_data_is_on_its_way():
    process = forked_context().Process(target=_close_in_all_ways, args=(1,), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0
