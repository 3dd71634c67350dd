"""Two ends of a link in one process."""

from __future__ import annotations

import contextlib
import itertools
import queue
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
