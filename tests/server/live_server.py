"""The application behind real sockets: the server's own uvicorn, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from fastapi import FastAPI

from moeflow.server.config import ServerConfig
from moeflow.server.launch import HttpServer
from moeflow.server.listener import listen, url


@contextlib.contextmanager
def serve_in_thread(app: FastAPI) -> Iterator[str]:
    """Yield the server's address."""
    listener = listen(ServerConfig(port=0))
    server = HttpServer(app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield url(listener)
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def complaints(log: str) -> str:
    """Return what a server wrote to stderr, without what it says of its speed where the machine was measured."""
    return "".join(line for line in log.splitlines(keepends=True) if not line.startswith("expect some "))
