"""This process's end of all encrypted connections to processes of its cluster: it accepts, connects and waits for them.

One socket of ZeroMQ carries all links, each message encrypted by CurveZMQ with keys from the cluster token. Only one
thread at a time uses the socket. Of several threads that wait, one polls and delivers to all; no other thread delays a
message.

A heartbeat every `HEARTBEAT_S` ends a link within `SILENCE_S` if the other end is stopped, lost or unreachable.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import zmq

from moeflow.core.address import format_address
from moeflow.core.errors import ConfigError, GroupError
from moeflow.parallel.tcp.admission import ZAP_DOMAIN
from moeflow.parallel.tcp.connection_watch import ConnectionWatch, FirstMessage, Peer, hang_up
from moeflow.parallel.tcp.curve_keys import CurveKeys
from moeflow.parallel.tcp.handshake_errors import Failure, connecting_error
from moeflow.parallel.tcp.link import PIECE_BYTES, Kind, Link, Message

HANDSHAKE_S: Final = 5.0
HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 3.0  # after a heartbeat
_FAREWELL_S: Final = 0.3  # for other ends to hang up, when the endpoint closes
_BACKLOG: Final = 1024
_MAX_FRAME_BYTES: Final = PIECE_BYTES + 4096
_GONE: Final = "is gone: its process has ended or is stopped, or the network between is cut"

OnLink = Callable[[Link], None]


@dataclass(eq=False, slots=True)
class _Attempt:
    """A connection in the making."""

    target: str
    peer: Peer
    link: Link
    is_made: bool = False
    failure: Failure | None = None


class Endpoint:
    """The socket and its links. All methods may be called from any thread."""

    def __init__(self, token: bytes) -> None:
        """Begin, with the token of the cluster."""
        self._keys = CurveKeys.of(token)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _set_options(self._socket)
        self._changed = threading.Condition(threading.RLock())
        self._poll = select.poll()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK)  # ends the poll of the thread that leads
        for descriptor in (self._socket.FD, self._alarm):
            self._poll.register(descriptor, select.POLLIN)
        self._has_leader = self._is_closing = self._is_closed = False
        self._links: dict[bytes, Link] = {}  # by routing id
        self._connections: dict[int, tuple[Peer, Link]] = {}  # by descriptor
        self._first_messages: list[FirstMessage] = []
        self._connecting = threading.Lock()
        self._targets: set[str] = set()  # that a link was made to
        self._attempt: _Attempt | None = None
        self._numbers = itertools.count()
        self._on_link: OnLink | None = None
        self._watch = ConnectionWatch(self._socket, self, self._keys.connecting.public)

    def listen(self, host: str, port: int, on_link: OnLink) -> int:
        """Accept connections; `on_link` gets the authenticated ones, each in a thread of its own.

        Port 0 is any free one. Returns the port. Raises: ConfigError if this process cannot listen there.
        """
        self._on_link = on_link
        with self._changed:
            keys = self._keys.accepting
            self._socket.curve_server, self._socket.zap_domain = True, ZAP_DOMAIN
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            try:
                self._socket.bind(self._target(_resolve(host, port), port))
            except socket.gaierror as error:
                raise _cannot_listen(host, port, error.strerror or str(error)) from None
            except zmq.ZMQError as error:
                raise _cannot_listen(host, port, os.strerror(error.errno or 0)) from None
            bound = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            self._watch.note_port(bound)
            return bound

    def connect(self, host: str, port: int) -> Link:
        """Return a link to the endpoint that listens there; an endpoint has one link to an address in its life.

        Blocks: some seconds at most. Raises: GroupError if there is no answer; ConfigError if the other end has
        another token or is no moeflow of this version.
        """
        where = format_address(host, port)
        try:
            address = _resolve(host, port)
        except OSError as error:
            raise GroupError(f"cannot connect to {where}: {error.strerror or error}") from None
        with self._connecting:
            attempt = self._begin(address, host, port)
            self.wait(lambda: attempt.is_made or attempt.failure is not None, HANDSHAKE_S + 1)
            self._attempt = None
        if attempt.is_made:
            return attempt.link
        self._forget(attempt)
        if attempt.failure is None:
            raise GroupError(f"cannot connect to {where}: timed out")
        raise connecting_error(attempt.failure, where, (address, port), HANDSHAKE_S)

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Return whether a condition about links is true in time; None: without an end. Receives meanwhile."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self._receive()
            while not is_ready() and not self._is_closed:
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                if self._has_leader:
                    self._changed.wait(left_s)
                else:
                    self._lead(left_s)
            return is_ready()

    def receive(self) -> None:
        """Deliver arrived messages. Blocks: not at all."""
        with self._changed:
            self._receive()

    def send(self, link: Link, frames: Sequence[memoryview]) -> None:
        """Send a message; their memory may change afterwards. If the link has ended nothing happens."""
        with self._changed:
            if self._is_closed:
                return
            try:
                self._socket.send_multipart([link.routing_id, *frames], zmq.NOBLOCK)
            except zmq.ZMQError:  # there is no connection any more
                link.note_end(f"{link.peer} {_GONE}")
                self._announce()
            self._receive()  # sending may take the signal that something has arrived

    def end(self, link: Link, reason: str) -> None:
        """End a link on this side."""
        with self._changed:
            link.note_end(reason)
            self._announce()

    def close(self) -> None:
        """End all links. Blocks: for a moment."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            for link in list(self._links.values()):
                link.close()
        self.wait(lambda: not self._connections, _FAREWELL_S)
        with self._changed:
            self._hang_up(self._connections)
        self.wait(lambda: not self._connections, _FAREWELL_S)
        with self._changed:
            self._is_closed = True
            self._announce()
            self._changed.wait_for(lambda: not self._has_leader)
        self._socket.monitor(None, 0)  # without the lock: the watching thread must go on reading until then
        self._watch.close()
        self._socket.close()
        self._context.term()
        os.close(self._alarm)

    # The socket's users have the lock.

    def _begin(self, address: str, host: str, port: int) -> _Attempt:
        """Begin to connect."""
        routing_id = b"to %d" % next(self._numbers)
        with self._changed:
            target = self._target(address, port)
            assert target not in self._targets, "ZeroMQ ends all connections to an address when one of them ends"
            self._targets.add(target)
            link = Link(self, routing_id, host, port)
            self._attempt = _Attempt(target, Peer(address, port), link)
            self._links[routing_id] = link
            keys = self._keys.connecting
            self._socket.curve_server, self._socket.curve_serverkey = False, self._keys.accepting.public
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, routing_id)
            self._socket.connect(target)
            return self._attempt

    def _forget(self, attempt: _Attempt) -> None:
        """Leave nothing of a failed attempt, so that another one may follow."""
        self.end(attempt.link, "it was not made")
        with self._changed:
            self._links.pop(attempt.link.routing_id, None)
            self._targets.discard(attempt.target)
            with contextlib.suppress(zmq.ZMQError):  # ZeroMQ has ended it
                self._socket.disconnect(attempt.target)

    def _target(self, address: str, port: int) -> str:
        """Return ZeroMQ's name of an address, and set the socket to its family."""
        self._socket.setsockopt(zmq.IPV6, int(":" in address))
        return f"tcp://{format_address(address, port)}"

    def _lead(self, left_s: float | None) -> None:
        """Wait until something arrives, for all threads, and deliver it. Releases the lock meanwhile."""
        self._has_leader = True
        self._changed.release()
        ready: list[tuple[int, int]] = []
        try:
            ready = self._poll.poll(None if left_s is None else left_s * 1000 + 1)
        finally:
            self._changed.acquire()
            self._has_leader = False
            if any(descriptor == self._alarm for descriptor, _ in ready):
                os.eventfd_read(self._alarm)
            self._receive()
            self._changed.notify_all()

    def _hang_up(self, descriptors: Collection[int]) -> None:
        """End connections. A connection that ends before its socket closes cannot meet a heartbeat meanwhile.

        ZeroMQ would abort the process: a heartbeat must not find a broken connection of a closing socket.
        """
        for descriptor in descriptors:
            hang_up(descriptor, self._connections[descriptor][0])

    def _announce(self) -> None:
        """Have waiting threads look again."""
        self._changed.notify_all()
        if self._has_leader:
            os.eventfd_write(self._alarm, 1)

    def _receive(self) -> None:
        if self._is_closed:
            return
        has_news = False
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._deliver(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            has_news = True
        if has_news:
            self._announce()

    def _deliver(self, frames: Sequence[zmq.Frame]) -> None:
        routing_id, head, *_ = frames
        link = self._links.get(routing_id.bytes)
        try:
            message = Message.of([frame.buffer for frame in frames[1:]])
        except GroupError as error:
            if link is not None:
                link.note_end(f"{link.peer}: {error}")
            return
        if link is not None:
            link.deliver(message)
            if message.kind == Kind.FAREWELL:
                self._hang_up([number for number, (_, it) in self._connections.items() if it is link])
        elif self._on_link is not None:
            self._first_messages.append(FirstMessage(routing_id.bytes, int(head.get(zmq.SRCFD)), message))
            self._watch.wake()

    # Below, called by the watching thread.

    def connected(self, target: str, descriptor: int) -> None:
        """See `ConnectionEvents`."""
        with self._changed:
            if self._attempt is not None and self._attempt.target == target:
                self._connections[descriptor] = self._attempt.peer, self._attempt.link

    def authenticated(self, target: str) -> None:
        """See `ConnectionEvents`."""
        attempt = self._attempt
        if attempt is not None and attempt.target == target and not attempt.is_made:
            attempt.link.send(Kind.HELLO, "", memoryview(b""))
            with self._changed:
                attempt.is_made = True
                self._announce()

    def failed(self, target: str, failure: Failure) -> None:
        """See `ConnectionEvents`."""
        with self._changed:
            if self._attempt is not None and self._attempt.target == target and not self._attempt.is_made:
                self._attempt.failure = failure
                self._announce()

    def broken(self, descriptor: int) -> None:
        """See `ConnectionEvents`."""
        with self._changed:
            self._receive()  # its messages came before
            _, link = self._connections.pop(descriptor, (None, None))
            if link is not None:
                self._links.pop(link.routing_id, None)
                link.note_end(f"{link.peer} {_GONE}")
                self._announce()

    def first_messages(self) -> list[FirstMessage]:
        """See `ConnectionEvents`."""
        with self._changed:
            self._receive()
            firsts, self._first_messages = self._first_messages, []
            return firsts

    def begin(self, firsts: list[FirstMessage]) -> None:
        """See `ConnectionEvents`."""
        with self._changed:
            for routing_id, descriptor, message in firsts:
                link = self._links.get(routing_id)
                if link is not None:
                    link.deliver(message)
                elif message.kind == Kind.HELLO and (new := self._new_link(routing_id, descriptor)) is not None:
                    threading.Thread(target=self._on_link, args=(new,), name="new link", daemon=True).start()
            if firsts:
                self._deliver_later_ones()
                self._announce()

    def _deliver_later_ones(self) -> None:
        """Deliver the messages after the first ones, before any newer message."""
        later, self._first_messages = self._first_messages, []
        for each in later:
            link = self._links.get(each.routing_id)
            if link is None:
                self._first_messages.append(each)
            else:
                link.deliver(each.message)

    def _new_link(self, routing_id: bytes, descriptor: int) -> Link | None:
        """Return the link of an accepted connection; None: it has ended already."""
        peer = self._watch.peer_of(descriptor)
        if peer is None:
            return None
        link = self._links[routing_id] = Link(self, routing_id, *peer)
        self._connections[descriptor] = peer, link
        self._watch.note_authenticated(descriptor)
        return link


def connect(host: str, port: int, token: bytes) -> Link:
    """Return a link with an endpoint of its own, which the caller closes. Blocks and raises: as `Endpoint.connect`."""
    endpoint = Endpoint(token)
    try:
        return endpoint.connect(host, port)
    except BaseException:
        endpoint.close()
        raise


def _resolve(host: str, port: int) -> str:
    """Return a numeric address. Raises: OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda info: info[0] != socket.AF_INET)[4][0])  # localhost means 127.0.0.1 first


def _cannot_listen(host: str, port: int, reason: str) -> ConfigError:
    where = format_address(host, port)
    return ConfigError(
        f"cannot listen for ranks at {where}: {reason}; name another port, and an address of this machine"
    )


def _set_options(router: zmq.Socket[bytes]) -> None:
    router.setsockopt(zmq.LINGER, 0)  # nothing is kept for a connection that has ended
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # messages without a connection are errors
    router.setsockopt(zmq.RECONNECT_IVL, -1)  # a broken link stays broken
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    router.setsockopt(zmq.BACKLOG, _BACKLOG)
    router.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    router.setsockopt(zmq.CONNECT_TIMEOUT, int(HANDSHAKE_S * 1000))
    router.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    router.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        router.setsockopt(option, 0)  # a full queue would stop heartbeats
