"""The HTTP side of a server: uvicorn with our connections, its own signal handling left out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from moeflow.engine.generator import Generator
from moeflow.server.accept_errors import AcceptErrors
from moeflow.server.connection import PATIENCE, Patience, TimedConnection
from moeflow.server.open_connections import ACCEPTED_AT_ONCE, MAX_CONNECTIONS, OpenConnections
from moeflow.server.service import Service
from moeflow.server.tls import load_certificate, tls_context
from moeflow.server.tls_handshake import TlsHandshake

_LOOK_TICKS = 3  # of uvicorn, each a tenth of a second
_WAITING_CONNECTIONS = 2048  # that the system has taken and the event loop has not
FLUSH_S = 5  # time for slow clients to read bytes already written


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, and with nothing that depends on what else is installed."""

    def __init__(
        self,
        app: FastAPI,
        patience: Patience = PATIENCE,
        *,
        max_connections: int = MAX_CONNECTIONS,
        entry: ASGIApp | None = None,
        is_behind_fronts: bool = False,
    ) -> None:
        """`entry` gets requests in the place of `app`. Other processes share the socket then, so that connections are
        accepted one at a time. Behind fronts, these have decrypted requests, and name their clients.
        """
        self.app = app
        self.service: Service = app.state.service
        self._open_connections = OpenConnections(max_connections)
        self._patience = patience
        self._handshakes: dict[TimedConnection, TlsHandshake] = {}
        config = self.service.config
        self._tls = None if is_behind_fronts else tls_context(config)
        proxies = "*" if is_behind_fronts else config.forwarded_allow_ips
        super().__init__(
            uvicorn.Config(
                entry or app,
                http=self._protocol,  # type: ignore[arg-type]  # it is called, and nothing else is done with it
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # its warnings are about clients' mistakes, which have their own lines
                access_log=False,
                proxy_headers=proxies is not None,
                forwarded_allow_ips=proxies,
                root_path=config.root_path,
                server_header=False,
                timeout_graceful_shutdown=FLUSH_S,
                backlog=1 if entry else ACCEPTED_AT_ONCE,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections. More of them may wait in the system than the event loop accepts at once."""
        await super().startup(sockets)
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        for listener in sockets or ():
            listener.listen(_WAITING_CONNECTIONS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let open connections finish, and end handshakes."""
        for handshake in tuple(self._handshakes.values()):
            handshake.close_silently()
        await super().shutdown(sockets)

    def _protocol(self, **given: Any) -> asyncio.Protocol | TlsHandshake:
        """Return what speaks with a new client; `given` is uvicorn's."""
        connection = TimedConnection(
            **given, patience=self._patience, on_open=self._admit, on_refusal=self.service.metrics.count_refusal
        )
        if self._tls is None:
            return connection
        return TlsHandshake(connection, self._tls, self._handshakes, self._admit, self._patience.patience_s)

    def _admit(self, new: TimedConnection | TlsHandshake) -> None:
        if isinstance(new, TimedConnection):
            self._handshakes.pop(new, None)  # it has ended
        if len(self.server_state.connections) + len(self._handshakes) > self._open_connections.limit:
            connections = [one for one in self.server_state.connections if isinstance(one, TimedConnection)]
            self._open_connections.admit(new, [*connections, *self._handshakes.values()])

    async def attach(self, generator: Generator) -> None:
        """Begin to serve the one model with this generator."""
        self.service.attach(generator)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.service.drain()

    def reload(self) -> None:
        """Read keys and certificate again. Raises: ConfigError; a file that cannot be used changes nothing."""
        tls_context(self.service.config)  # OpenSSL drops the old key for a certificate that does not match it
        self.service.reload_keys()
        if self._tls is not None:
            load_certificate(self._tls, self.service.config)

    async def on_tick(self, counter: int) -> bool:
        """End slow connections; uvicorn calls this ten times a second."""
        if counter % _LOOK_TICKS == 0:
            now_s = time.monotonic()
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, TimedConnection):
                    connection.end_if_slow(now_s)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield
