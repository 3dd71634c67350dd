"""How links come to be: one process connects, the other accepts, and both authenticate each other.

Nothing that is sent before costs more than a thread for some seconds, and there are few of them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moeflow.core.address import format_address
from moeflow.core.errors import ConfigError, GroupError
from moeflow.parallel.tcp.authentication import GREETING_BYTES, check_greeting, prove, verify
from moeflow.parallel.tcp.pending_connections import PendingConnections
from moeflow.parallel.tcp.refusal_log import RefusalLog
from moeflow.parallel.tcp.tcp_link import TcpLink

logger = logging.getLogger(__name__)

HANDSHAKE_S: Final = 5.0
_BACKLOG: Final = 1024
_ACCEPTED_AT_ONCE: Final = 64
_PAUSE_S: Final = 0.1


def connect(host: str, port: int, token: bytes) -> TcpLink:
    """Return a link to who listens there.

    Blocks: some seconds at most. Raises: GroupError if there is no answer; ConfigError as `prove`.
    """
    where = format_address(host, port)
    try:
        connection = socket.create_connection((host, port), HANDSHAKE_S)
    except OSError as error:
        raise GroupError(f"cannot connect to {where}: {error.strerror or error}") from None
    try:
        return TcpLink(connection, prove(connection, token, HANDSHAKE_S))
    except (GroupError, ConfigError) as error:
        connection.close()
        raise type(error)(f"{where}: {error}") from None
    except BaseException:
        connection.close()
        raise


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 is any free one. Raises: ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, address = min(found, key=lambda info: info[0] != socket.AF_INET)  # localhost means 127.0.0.1 first
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        where = format_address(host, port)
        raise ConfigError(
            f"cannot listen for ranks at {where}: {error.strerror or error}; name another port, and an address of this "
            "machine"
        ) from None
    listener.setblocking(False)
    return listener


@dataclass(frozen=True, eq=False, slots=True)
class _Arrival:
    connection: socket.socket
    host: str
    port: int


class Acceptor:
    """Accepts connections until it is closed. `on_link` gets the authenticated ones, each in a thread of its own.

    One thread waits for the greetings of all connections. A handshake, which takes a thread, begins after a greeting.
    """

    def __init__(self, listener: socket.socket, token: bytes, on_link: Callable[[TcpLink], None]) -> None:
        """Begin. Takes over `listener`."""
        self._listener = listener
        self._token = token
        self._on_link = on_link
        self._refusals = RefusalLog(logger)
        self._pending: PendingConnections[_Arrival] = PendingConnections()
        self._finished: queue.SimpleQueue[str] = queue.SimpleQueue()  # addresses of handshakes that have ended
        self._has_ended = False
        self._wake, self._alarm = socket.socketpair()
        self._wake.setblocking(False)
        self._alarm.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for readable in (listener, self._wake):
            self._selector.register(readable, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="acceptor", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Accept no more; those under way may come to their end."""
        self._has_ended = True
        self._ring()
        self._thread.join()

    def _ring(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(OSError):  # it is awake already, or has ended
            self._alarm.send(b"x")

    def _serve(self) -> None:
        with self._selector, self._wake, self._alarm, self._listener:
            while not self._has_ended:
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake:
                        self._wake.recv(_BACKLOG)
                    elif key.data.connection.fileno() >= 0:  # it was not closed for another one meanwhile
                        self._read_greeting(key.data)
                self._advance()
            for arrival in self._pending.empty():
                arrival.connection.close()

    def _patience_s(self) -> float | None:
        deadline_s = self._pending.next_deadline_s()
        return None if deadline_s is None else max(deadline_s - time.monotonic(), 0)

    def _accept(self) -> None:
        """Take in so many connections at once."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, (host, port, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it has gone, or there are too many open files
                self._refusals.note("", "a connection could not be accepted", str(error.strerror))
                time.sleep(_PAUSE_S)
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, GREETING_BYTES)
            arrival = _Arrival(connection, host, port)
            self._selector.register(connection, selectors.EVENT_READ, arrival)
            victim = self._pending.enter(arrival, host, time.monotonic() + HANDSHAKE_S)
            if victim is not None:
                self._discard(victim)

    def _read_greeting(self, arrival: _Arrival) -> None:
        """Check the bytes that a connection has sent. They stay for its handshake."""
        self._selector.unregister(arrival.connection)
        try:
            check_greeting(arrival.connection.recv(GREETING_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            arrival.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        except (GroupError, OSError) as error:
            self._pending.leave(arrival)
            self._refuse(arrival, error)
        else:
            self._pending.greet(arrival)

    def _advance(self) -> None:
        """End the connections that are overdue, and begin handshakes while more may run."""
        while not self._finished.empty():
            self._pending.finish(self._finished.get())
        for arrival in self._pending.overdue(time.monotonic()):
            self._refuse(arrival, GroupError("authentication does not answer in time"))
        while (greeted := self._pending.next()) is not None:
            threading.Thread(target=self._verify, args=(greeted,), name="handshake", daemon=True).start()

    def _verify(self, arrival: _Arrival) -> None:
        try:
            link = TcpLink(arrival.connection, verify(arrival.connection, self._token, HANDSHAKE_S))
        except (GroupError, OSError) as error:
            self._refuse(arrival, error)
            return
        finally:
            self._finished.put(arrival.host)
            self._ring()
        self._on_link(link)

    def _refuse(self, arrival: _Arrival, error: Exception) -> None:
        where = format_address(arrival.host, arrival.port)
        self._refusals.note(arrival.host, f"a connection from {where} is refused", str(error))
        self._discard(arrival)

    def _discard(self, arrival: _Arrival) -> None:
        with contextlib.suppress(KeyError, ValueError):  # its greeting was read, or it is closed
            self._selector.unregister(arrival.connection)
        arrival.connection.close()
