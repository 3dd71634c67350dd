"""How links come to be: one process connects, the other accepts, and both authenticate each other.

Nothing that is sent before costs more than a thread for some seconds, and there are few of them.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from moeflow.core.address import format_address, parse_address
from moeflow.core.errors import ConfigError, GroupError
from moeflow.parallel.tcp.authentication import prove, verify
from moeflow.parallel.tcp.refusal_log import RefusalLog
from moeflow.parallel.tcp.tcp_link import TcpLink

logger = logging.getLogger(__name__)

HANDSHAKE_S: Final = 5.0
_MAX_PENDING: Final = 32  # connections that are not authenticated yet; more are closed
_BACKLOG: Final = 64
_PAUSE_S: Final = 0.1


def connect(host: str, port: int, token: bytes) -> TcpLink:
    """Return a link to who listens there.

    Blocks: some seconds at most. Raises: GroupError if nobody answers; ConfigError as `prove`.
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


class Acceptor:
    """Accepts connections until it is closed. `on_link` gets the authenticated ones, each in a thread of its own."""

    def __init__(self, listener: socket.socket, token: bytes, on_link: Callable[[TcpLink], None]) -> None:
        """Begin. Takes over `listener`."""
        self._listener = listener
        self._token = token
        self._on_link = on_link
        self._refusals = RefusalLog(logger)
        self._pending = threading.BoundedSemaphore(_MAX_PENDING)
        self._wake, self._end = os.pipe()
        self._thread = threading.Thread(target=self._accept, name="acceptor", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Accept no more; those under way may come to their end."""
        os.close(self._end)
        self._thread.join()
        os.close(self._wake)
        self._listener.close()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not any(descriptor == self._wake for descriptor, _ in poll.poll()):
            try:
                connection, address = self._listener.accept()
            except OSError as error:  # it went again, or there are too many open files
                logger.warning("a connection could not be accepted: %s", error.strerror)
                time.sleep(_PAUSE_S)
                continue
            if not self._pending.acquire(blocking=False):
                connection.close()
                continue
            where = format_address(*address[:2])
            threading.Thread(target=self._verify, args=(connection, where), name="handshake", daemon=True).start()

    def _verify(self, connection: socket.socket, where: str) -> None:
        try:
            link = TcpLink(connection, verify(connection, self._token, HANDSHAKE_S))
        except (GroupError, OSError) as error:
            self._refusals.note(parse_address(where)[0], f"a connection from {where} is refused", str(error))
            connection.close()
            return
        finally:
            self._pending.release()
        self._on_link(link)
