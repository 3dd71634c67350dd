"""The application behind real sockets: the server's own uvicorn, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

from fastapi import FastAPI

from moeflow.server.config import ServerConfig
from moeflow.server.connection import PATIENCE, Patience
from moeflow.server.http_server import HttpServer
from moeflow.server.listener import listen, url
from moeflow.server.open_connections import MAX_CONNECTIONS
from tests.server.checked_app import CheckedApp


@contextlib.contextmanager
def serve_in_thread(
    app: FastAPI,
    patience: Patience = PATIENCE,
    *,
    listener: socket.socket | None = None,
    max_connections: int = MAX_CONNECTIONS,
    on_start: Callable[[HttpServer], None] = lambda _: None,
) -> Iterator[str]:
    """Yield the server's address. A listener that is given is closed in the end, as one's own is. Answers are checked.

    `on_start` gets the server.
    """
    listener = listener or listen(ServerConfig(port=0))
    server = HttpServer(app, patience, max_connections=max_connections)
    checked = CheckedApp(app)
    server.config.app = checked
    on_start(server)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield url(listener)
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
    checked.require_no_problems()


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether a condition holds in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def complaints(log: str) -> str:
    """Return a server's stderr without the lines of requests and of the expected speed on a measured machine. Log lines
    lose time, level and logger.
    """
    lines = log.splitlines(keepends=True)
    wanted = (line for line in lines if not line.startswith("Estimate: ") and ".request_log: request " not in line)
    return "".join(re.sub(r"^\d{4}-\S+ [A-Z]+ moeflow[\w.]*: ", "", line) for line in wanted)
