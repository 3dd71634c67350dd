"""One front: an HTTP process with a tokenizer, whose engines are its server's.

Run as `python -m moeflow.server.fronts.main LINK LISTENER MEMORY`, with descriptors that it inherits. It ends at once
when its server is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys

from moeflow.core.errors import ConfigError
from moeflow.engine.generator import Generator
from moeflow.kernels.on_demand import on_demand
from moeflow.server.app import create_app
from moeflow.server.fronts.forwarding import Forwarding
from moeflow.server.fronts.front_client import FrontClient, FrontConversations
from moeflow.server.fronts.messages import (
    AskRunning,
    Attached,
    Counts,
    Drain,
    Found,
    Link,
    Logged,
    Running,
    Settings,
    Started,
    Stop,
    ToFront,
    Told,
)
from moeflow.server.guard.occupancy import Occupancy
from moeflow.server.http_server import HttpServer
from moeflow.server.loading import load_tokenizer
from moeflow.server.log_ring import log_ring
from moeflow.server.logs import start_logs
from moeflow.server.model_pool import ModelPool
from moeflow.server.open_connections import max_connections, raise_descriptor_limit
from moeflow.server.service import Service
from moeflow.server.tracing_choice import is_tracing_wanted

with on_demand(__name__):
    from moeflow.server import tracing

logger = logging.getLogger(__name__)

_COUNTS_S = 0.5  # how often counts are sent
_LOOK_S = 0.01


class Front:
    """This process."""

    def __init__(self, link: Link[ToFront], settings: Settings, memory: int) -> None:
        config = settings.config
        self._link = link
        self._tokenizer = asyncio.create_task(asyncio.to_thread(load_tokenizer, settings.model_path))
        self._conversations = FrontConversations(link)
        self._client: FrontClient | None = None
        self.tracer = tracing.RequestTracer(config.otlp_endpoint) if is_tracing_wanted(config.otlp_endpoint) else None
        pool = ModelPool(max_queue=config.max_queue, occupancy=Occupancy.mapped(memory, settings.number))
        on_request_end = None if self.tracer is None else self.tracer.trace
        app = create_app(None, config, on_request_end, pool=pool, conversations=self._conversations)
        self._service: Service = app.state.service
        self._service.stories.hand_over(lambda story: link.send(Told(story)))
        self.http = HttpServer(
            app,
            max_connections=max_connections(raise_descriptor_limit()),
            entry=Forwarding(app, self._service, settings.server_socket),
        )

    async def serve(self, listener: socket.socket) -> None:
        """Serve until the server has this front stop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        serving = asyncio.create_task(self.http.serve(sockets=[listener]))
        while not self.http.started and not serving.done():
            await asyncio.sleep(_LOOK_S)
        counting = asyncio.create_task(self._send_counts())
        while not isinstance(message := await self._link.receive(), Stop):
            if message is None:
                os._exit(1)  # nothing can be answered any more
            await self._take(message)
        self.http.should_exit = True
        await serving
        counting.cancel()
        self._link.send(Counts(self._service.metrics.counts()))

    async def _take(self, message: ToFront) -> None:
        if isinstance(message, Attached):
            self._client = FrontClient(self._link, message.model)
            generator = Generator(self._client, await self._tokenizer)
            gc.freeze()
            self._service.attach(generator)
            self._link.send(Started())
        elif isinstance(message, Found):
            self._conversations.take(message)
        elif isinstance(message, AskRunning):
            self._link.send(Running(message.number, self._service.stories.running()))
        elif isinstance(message, Drain):
            self._service.drain()
        elif self._client is not None and not isinstance(message, Settings | Stop):
            self._client.take(message)

    async def _send_counts(self) -> None:
        """Send counts and lines of the log whenever there are new ones."""
        sent, last_line = None, 0
        while True:
            await asyncio.sleep(_COUNTS_S)
            if (counts := self._service.metrics.counts()) != sent:
                self._link.send(Counts(counts))
                sent = counts
            if lines := log_ring().since(last_line):
                self._link.send(Logged(lines))
                last_line = lines[-1].number

    def _reload(self) -> None:
        try:
            self.http.reload()
        except ConfigError as error:
            logger.error("reload failed, and the earlier files stay in use: %s", error)


async def run(link_end: int, listener: int, memory: int) -> None:
    """Be a front; the numbers are descriptors."""
    link: Link[ToFront] = await Link.open(socket.socket(fileno=link_end), ToFront)
    settings = await link.receive()
    if not isinstance(settings, Settings):
        return  # the server is gone
    start_logs(settings.config.log_level, settings.config.log_format)
    front = Front(link, settings, memory)
    with contextlib.closing(front.tracer) if front.tracer else contextlib.nullcontext():
        await front.serve(socket.socket(fileno=listener))
    link.close()


def main() -> None:
    """Entry point of the process. Its server decides when it ends, whatever signals reach the whole group."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)  # SIG_IGN would hold in its children, too
    asyncio.run(run(*map(int, sys.argv[1:4])))


if __name__ == "__main__":
    main()
