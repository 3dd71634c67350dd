"""Two ends of a link in one process, and a proxy that can be cut."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Iterator

from moeflow.parallel.tcp.endpoint import Endpoint, connect
from moeflow.parallel.tcp.link import Link

TOKEN = b"the token of the tests"
PATIENCE_S = 20.0


@contextlib.contextmanager
def listening(token: bytes = TOKEN) -> Iterator[tuple[int, Callable[[], Link]]]:
    """Yield the port of an endpoint, and a function that returns the next link to it."""
    arrivals: queue.Queue[Link] = queue.Queue()
    with contextlib.closing(Endpoint(token)) as endpoint:
        yield endpoint.listen("127.0.0.1", 0, arrivals.put), lambda: arrivals.get(timeout=PATIENCE_S)


@contextlib.contextmanager
def connected(port: int, token: bytes = TOKEN) -> Iterator[Link]:
    """Yield a link to an endpoint of this machine."""
    link = connect("127.0.0.1", port, token)
    with contextlib.closing(link.endpoint):
        yield link


@contextlib.contextmanager
def two_ends() -> Iterator[tuple[Link, Link]]:
    """Yield both ends of a link: the one that connected, and the other one."""
    with listening() as (port, next_link), connected(port) as link:
        yield link, next_link()


@contextlib.contextmanager
def all_linked(size: int) -> Iterator[list[dict[int, Link]]]:
    """Yield the links of so many ranks, by the others' numbers."""
    links: list[dict[int, Link]] = [{} for _ in range(size)]
    with contextlib.ExitStack() as stack:
        endpoints = [stack.enter_context(contextlib.closing(Endpoint(TOKEN))) for _ in range(size)]
        arrivals: list[queue.Queue[Link]] = [queue.Queue() for _ in range(size)]
        ports = [it.listen("127.0.0.1", 0, found.put) for it, found in zip(endpoints, arrivals, strict=True)]
        for one, other in itertools.combinations(range(size), 2):
            links[other][one] = endpoints[other].connect("127.0.0.1", ports[one])
            links[one][other] = arrivals[one].get(timeout=PATIENCE_S)
            links[one][other].peer, links[other][one].peer = f"rank {other}", f"rank {one}"
        yield links


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

    def passing(self, data: bytes) -> bytes:
        """Return the bytes to forward instead of these."""
        return data

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
                        target.sendall(self.passing(data))
            finally:  # a reset is an end, too
                if not self._is_cut.is_set():
                    target.shutdown(socket.SHUT_RDWR)
