"""A server without descriptors logs one line, and other errors of the event loop keep their tracebacks."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket

import httpx
import pytest

from moeflow.server.accept_errors import AcceptErrors
from tests.server.live_server import eventually, serve_in_thread

LINE = "new connections wait: Too many open files; raise the limit of the server's process"


def test_connections_without_a_descriptor_wait_and_are_served_later(app, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    request = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    with serve_in_thread(app) as address, socket.socket() as client:
        assert httpx.get(f"{address}/version").status_code == 200
        highest = max(map(int, os.listdir("/proc/self/fd")))
        fillers = [os.dup(client.fileno()) for _ in range(highest)]  # so that no lower number is free
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1, hard))
            client.connect(("127.0.0.1", httpx.URL(address).port))
            client.sendall(request)
            assert eventually(lambda: LINE in caplog.messages)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for filler in fillers:
                os.close(filler)
        client.settimeout(20)
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    assert [message for message in caplog.messages if "connections wait" in message or "socket.accept" in message] == [
        LINE
    ]


@pytest.mark.parametrize("context", [{"exception": OSError(errno.EMFILE, "x")}, {"socket": 1, "exception": OSError()}])
def test_other_errors_are_logged_as_ever(context, caplog):
    async def fail() -> None:
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        asyncio.get_running_loop().call_exception_handler({"message": "something else", **context})

    asyncio.run(fail())
    assert caplog.messages == ["something else" + ("\nsocket: 1" if "socket" in context else "")]
