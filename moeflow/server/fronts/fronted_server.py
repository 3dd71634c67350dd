"""The HTTP side of a server with fronts: these accept connections, and forward some requests to it."""

from __future__ import annotations

import socket

from fastapi import FastAPI

from moeflow.core.errors import EngineError
from moeflow.engine.generator import Generator
from moeflow.server.fronts.fronts import Fronts
from moeflow.server.http_server import HttpServer


class FrontedServer(HttpServer):
    """An HTTP server that runs fronts, and listens on a socket for them alone."""

    def __init__(self, app: FastAPI, fronts: Fronts, *, max_connections: int) -> None:
        super().__init__(app, max_connections=max_connections, is_behind_fronts=True)
        self._fronts = fronts

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit`. Raises: EngineError if a front has died for good."""
        assert sockets is not None, "the fronts share the one that is given"
        (listener,) = sockets
        async with self._fronts.running(listener, self.service, self._end):
            await super().serve([self._fronts.server_socket])
            if self.force_exit:
                self._fronts.kill()
        if self._fronts.failure:
            raise EngineError(self._fronts.failure)

    async def attach(self, generator: Generator) -> None:
        """See `HttpServer`. Returns once all fronts take requests."""
        await super().attach(generator)
        await self._fronts.attach(generator.client)

    def drain(self) -> None:
        """See `HttpServer`."""
        super().drain()
        self._fronts.drain()

    def reload(self) -> None:
        """See `HttpServer`."""
        super().reload()
        self._fronts.reload()

    def _end(self) -> None:
        self.should_exit = True
