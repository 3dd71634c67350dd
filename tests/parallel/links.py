"""Two ends of a link in one process, with a proxy between them for tests that change bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from moeflow.parallel.tcp.authentication import SessionKeys
from moeflow.parallel.tcp.tcp_link import TcpLink

KEYS = SessionKeys(sending=b"s" * 32, receiving=b"r" * 32)
OTHER_KEYS = SessionKeys(sending=KEYS.receiving, receiving=KEYS.sending)


def connections() -> tuple[socket.socket, socket.socket]:
    """Return two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


@contextlib.contextmanager
def two_ends() -> Iterator[tuple[TcpLink, TcpLink]]:
    one, other = (TcpLink(*pair) for pair in zip(connections(), (KEYS, OTHER_KEYS), strict=True))
    with contextlib.closing(one), contextlib.closing(other):
        yield one, other


@contextlib.contextmanager
def end_and_wire() -> Iterator[tuple[TcpLink, socket.socket]]:
    """Yield a link whose other end is a plain socket."""
    connection, wire = connections()
    wire.settimeout(10)
    with contextlib.closing(TcpLink(connection, KEYS)) as link, wire:
        yield link, wire


def in_thread(call, *arguments) -> threading.Thread:
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    return thread


class Proxy:
    """Forwards bytes between its clients and an address, until it is cut: then it sends nothing more."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._is_cut = threading.Event()
        self._sockets: list[socket.socket] = []
        in_thread(self._accept)

    def cut(self) -> None:
        self._is_cut.set()

    def mend(self) -> None:
        """Forget the connections that were cut, as both kernels do after a while, and forward new ones."""
        self._reset()
        self._is_cut.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._reset()

    def _reset(self) -> None:
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                connection, _ = self._listener.accept()
                try:
                    onward = socket.create_connection(self._target)
                except OSError:
                    connection.close()
                    continue
                self._sockets += (connection, onward)
                in_thread(self._pass_on, connection, onward)
                in_thread(self._pass_on, onward, connection)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with source, contextlib.suppress(OSError):
            try:
                while data := source.recv(1 << 16):
                    if not self._is_cut.is_set():
                        target.sendall(data)
            finally:  # a reset is an end, too
                if not self._is_cut.is_set():
                    target.shutdown(socket.SHUT_RDWR)
