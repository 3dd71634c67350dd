"""The helper that stands between two ends passes on how a connection ends."""

from __future__ import annotations

import socket
import struct
from contextlib import closing

import pytest

from moeflow.cli.chaos.proxy import Proxy


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_an_end_is_passed_on(is_reset):
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(Proxy(listener.getsockname()[1])) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as near,
    ):
        far, _ = listener.accept()
        if is_reset:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        assert near.recv(1) == b""
