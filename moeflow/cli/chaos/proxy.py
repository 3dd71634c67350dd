"""A TCP proxy on this machine that stands for a network: it passes bytes on, goes silent, or resets connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER without a wait


class Proxy:
    """Forwards bytes between its clients and a port of this machine. Close it after use."""

    def __init__(self, port: int) -> None:
        """Listen at `self.port`, a free one."""
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._is_cut = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._start(self._accept)

    def cut(self) -> None:
        """Send nothing more, in connections that stay open."""
        self._is_cut.set()

    def mend(self) -> None:
        """Reset the connections that were cut, as both kernels do after a while, and forward new ones."""
        self.reset()
        self._is_cut.clear()

    def reset(self) -> None:
        """End all connections, at both ends, with a reset."""
        connections, self._sockets = self._sockets, set()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
                connection.shutdown(socket.SHUT_RD)  # sends nothing, and wakes the thread that closes it

    def passing(self, data: bytes) -> bytes:
        """Return the bytes to forward instead of these."""
        return data

    def close(self) -> None:
        """End all connections, and listen no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def _start(self, call: Callable[..., None], *arguments: socket.socket) -> None:
        threading.Thread(target=call, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                connection, _ = self._listener.accept()
                try:
                    onward = socket.create_connection(self._target)
                except OSError:
                    connection.close()
                    continue
                self._sockets |= {connection, onward}
                self._start(self._pass_on, connection, onward)
                self._start(self._pass_on, onward, connection)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with source, contextlib.suppress(OSError):
            try:
                while data := source.recv(1 << 16):
                    if not self._is_cut.is_set():
                        target.sendall(self.passing(data))
            finally:
                self._sockets.discard(source)
                if target in self._sockets and not self._is_cut.is_set():
                    target.shutdown(socket.SHUT_WR)
