"""A thread that watches the connections of an endpoint: it authorizes new ones, and notices the end of each.

ZeroMQ reports connections as events with their file descriptor. Heartbeats of ZeroMQ end a connection whose other end
is stopped or unreachable. Strangers hold a limited number of connections, each for seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from typing import Final, NamedTuple, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from moeflow.core.address import format_address
from moeflow.parallel.tcp.admission import ZAP_ADDRESS, zap_answer
from moeflow.parallel.tcp.handshake_errors import Failure, accepting_reason
from moeflow.parallel.tcp.link import Message
from moeflow.parallel.tcp.pending_connections import PendingConnections
from moeflow.parallel.tcp.refusal_log import RefusalLog

logger = logging.getLogger(__name__)

_MONITOR_ADDRESS: Final = "inproc://monitor"
_MAX_EVENTS: Final = 100_000  # that wait: with more, strangers would delay messages
_FAILURES: Final = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)


_EVENTS: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH  # not ..._PROTOCOL: to report it, ZeroMQ forgets to end the connection
)


class Peer(NamedTuple):
    """The other end of a connection."""

    host: str
    port: int


class FirstMessage(NamedTuple):
    """A message of a connection without a link."""

    routing_id: bytes
    descriptor: int
    message: Message


class ConnectionEvents(Protocol):
    """Takes what happens. Called by the watching thread."""

    def connected(self, target: str, descriptor: int) -> None:
        """A connection to `target` exists, and is not yet authenticated."""

    def authenticated(self, target: str) -> None:
        """The connection to `target` is authenticated; or an accepted one, under another name."""

    def failed(self, target: str, failure: Failure) -> None:
        """The connection to `target` was not made."""

    def broken(self, descriptor: int) -> None:
        """A connection has ended."""

    def first_messages(self) -> list[FirstMessage]:
        """Return and forget messages that have arrived from connections without a link."""

    def begin(self, firsts: list[FirstMessage]) -> None:
        """Make links of messages. All earlier events of their connections were reported."""


class ConnectionWatch:
    """The thread, and the connections that it knows."""

    def __init__(self, traffic: zmq.Socket[bytes], events: ConnectionEvents, admitted_key: bytes) -> None:
        """Begin. `traffic` is the endpoint's socket; `admitted_key` is the public key of processes that may connect."""
        self._events = events
        self._admitted_key = admitted_key
        self._traffic_descriptor: int = traffic.FD
        traffic.monitor(_MONITOR_ADDRESS, _EVENTS)
        self._monitor = traffic.context.socket(zmq.PAIR)
        self._monitor.set_hwm(_MAX_EVENTS)
        self._monitor.connect(_MONITOR_ADDRESS)
        self._zap = traffic.context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._has_ended = False
        self._port = 0
        self._pending: PendingConnections[int] = PendingConnections()
        self._peers: dict[int, Peer] = {}  # by descriptor
        self._failure: Failure | None = None  # of the connection whose end is reported next
        self._refusals = RefusalLog(logger)
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()

    def note_port(self, port: int) -> None:
        """Take the port at which the endpoint accepts connections."""
        self._port = port

    def wake(self) -> None:
        """Have the thread take first messages."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread, after the monitor. Blocks: for a moment."""
        self._has_ended = True
        self.wake()
        self._thread.join()
        os.close(self._wake)

    # Called by `ConnectionEvents`, in the thread.

    def peer_of(self, descriptor: int) -> Peer | None:
        """Return the other end of an accepted connection; None: it has ended."""
        return self._peers.get(descriptor)

    def note_authenticated(self, descriptor: int) -> None:
        """Note that the other end of an accepted connection has the token."""
        self._pending.leave(descriptor)

    def _run(self) -> None:
        poller = zmq.Poller()
        for readable in (self._monitor, self._zap, self._wake):
            poller.register(readable, zmq.POLLIN)
        while not self._has_ended:
            # A first message shows that a handshake is over. Otherwise only those read traffic that wait for it.
            poller.register(self._traffic_descriptor, zmq.POLLIN if len(self._pending) else 0)
            poller.poll()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            with contextlib.suppress(zmq.Again):
                while True:
                    self._zap.send_multipart(zap_answer(self._zap.recv_multipart(zmq.NOBLOCK), self._admitted_key))
            self._follow(self._events.first_messages())
        for readable in (self._zap, self._monitor):
            readable.close(0)

    def _follow(self, firsts: list[FirstMessage]) -> None:
        """Take all events that there are. ZeroMQ has reported the connections of these messages before.

        A descriptor may belong to several connections, one after the other: its messages are those of the last.
        """
        batch = self._read_events()
        accepted = {value: number for number, (event, value, _) in enumerate(batch) if event == zmq.EVENT_ACCEPTED}
        for number, (event, value, target) in enumerate(batch):
            if firsts and event == zmq.EVENT_DISCONNECTED and accepted.get(value, -1) < number:
                self._events.begin([it for it in firsts if it.descriptor == value])
                firsts = [it for it in firsts if it.descriptor != value]
            self._note(event, value, target)
        self._events.begin(firsts)

    def _read_events(self) -> list[tuple[int, int, str]]:
        """Return the events so far: kind, value, address."""
        found = []
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                found.append((int(event["event"]), int(event["value"]), event["endpoint"].decode()))
        return found

    def _note(self, event: int, value: int, target: str) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._enter(value)
        elif event == zmq.EVENT_CONNECTED:
            self._events.connected(target, value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._events.authenticated(target)
        elif event in _FAILURES:
            self._failure = Failure(event, value)
        elif event == zmq.EVENT_CLOSED:
            self._events.failed(target, Failure(event, value))
        elif event == zmq.EVENT_ACCEPT_FAILED:
            self._refusals.note("", "a connection could not be accepted", os.strerror(value))
        elif event == zmq.EVENT_DISCONNECTED:
            self._leave(value, target)

    def _enter(self, descriptor: int) -> None:
        peer = self._peers[descriptor] = self._peer_of(descriptor)
        victim = self._pending.enter(descriptor, peer.host)
        if victim is not None:
            hang_up(victim, self._peers[victim])

    def _leave(self, descriptor: int, target: str) -> None:
        failure, self._failure = self._failure, None
        peer = self._peers.pop(descriptor, None)
        if peer is None:
            self._events.failed(target, failure or Failure(zmq.EVENT_DISCONNECTED, 0))
        elif failure is not None or descriptor in self._pending:
            self._pending.leave(descriptor)
            where = format_address(*peer) if peer.host else "an end that has gone"
            self._refusals.note(peer.host, f"a connection from {where} is refused", accepting_reason(failure))
        self._events.broken(descriptor)

    def _peer_of(self, descriptor: int) -> Peer:
        """Return the other end of an accepted connection; an empty one if it has closed.

        ZeroMQ closes descriptors in another thread, so a descriptor may already belong to something else.
        """
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getsockname()[1] == self._port:
                return Peer(*connection.getpeername()[:2])
        return Peer("", 0)


def hang_up(descriptor: int, peer: Peer) -> None:
    """End a connection of ZeroMQ's to this peer, unless the descriptor belongs to something else meanwhile."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.getpeername()[:2] == tuple(peer):
            connection.shutdown(socket.SHUT_RDWR)
