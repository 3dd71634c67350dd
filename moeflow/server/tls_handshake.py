"""A TLS handshake with a client: the connection counts as open and silent until the handshake ends.

asyncio tells a protocol of its connection only afterwards. Clients that never end their handshakes could take all
descriptors of the process.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable

from moeflow.server.connection import TimedConnection


class TlsHandshake(SSLProtocol):
    """asyncio's TLS around one connection. It is in `handshakes` while its handshake lasts."""

    def __init__(
        self,
        connection: TimedConnection,
        context: ssl.SSLContext,
        handshakes: dict[TimedConnection, TlsHandshake],
        on_open: Callable[[TlsHandshake], None],
        timeout_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            loop,
            connection,
            context,
            None,  # type: ignore[arg-type]  # no future: nothing waits for the end of the handshake
            server_side=True,
            ssl_handshake_timeout=timeout_s,  # type: ignore[arg-type]  # asyncio takes parts of seconds, too
        )
        self._connection = connection
        self._handshakes = handshakes
        self._on_open = on_open
        self.silent_since_s = time.monotonic()

    @property
    def address(self) -> str | None:
        """The client's address; None: unknown."""
        peer = self._socket_transport.get_extra_info("peername")
        return peer[0] if peer else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake, unless too many connections are open."""
        self._socket_transport = transport
        self._handshakes[self._connection] = self
        super().connection_made(transport)
        self._on_open(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the handshake."""
        self._handshakes.pop(self._connection, None)
        super().connection_lost(exc)

    def close_silently(self) -> None:
        """Close the connection without an answer."""
        self._handshakes.pop(self._connection, None)
        self._socket_transport.abort()

    def refuse(self) -> None:
        """Do nothing yet: an answer is only possible after the handshake. The next client may end it before."""
