"""Starts everything in the right order and ends it in the right order: socket, model, HTTP, engine process; signals.

HTTP answers from the start ("loading"), so that probes and the page can see how far it is. The first SIGTERM
or Ctrl-C lets running requests finish within the deadline, the second ends at once. When the engine dies for good, so
does the server, for whatever watches it to start it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from moeflow.core.errors import ConfigError, MoeflowError
from moeflow.core.plan import Plan
from moeflow.engine.generator import Generator
from moeflow.engine.process.supervisor import Supervisor
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.planner.plan_text import what_to_expect
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.connection import PATIENCE, Connection, Patience
from moeflow.server.jobs.data_folder import Jobs
from moeflow.server.listener import listen, url
from moeflow.server.logs import configure_logs
from moeflow.server.service import Service

Result = TypeVar("Result")

_LOOK_TICKS = 3  # of uvicorn, each a tenth of a second
_FLUSH_S = 5  # how long slow clients may take to read what is already written
_BROKEN = 0  # among signals: the engine or HTTP has failed
_FORCED = 128  # shells' way to say "ended by signal": 128 + its number


def serve(plan: Callable[[], Plan], config: ServerConfig) -> int:
    """Serve until a signal or the engine's death ends it; return the exit code: 0 after an orderly end, else 1.

    `plan` returns what to run and may take minutes to make the model it names: the port is taken before.

    Blocks: until then.
    Raises: ConfigError for host or port; whatever keeps the model from loading.
    """
    configure_logs(config.log_level, config.log_format)
    with listen(config) as listener:
        decided = plan()
        if expected := what_to_expect(decided):
            print(expected, file=sys.stderr)
        if not config.is_loopback and config.api_key is None:
            print(
                f"warning: everybody who can reach {config.host} may use this server; set an API key", file=sys.stderr
            )
        return asyncio.run(_serve(listener, decided, config))


async def _serve(listener: socket.socket, plan: Plan, config: ServerConfig) -> int:
    app = create_app(None, config)
    service: Service = app.state.service
    jobs = app.state.jobs = _open_jobs(config, service)
    http = HttpServer(app)
    answering = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        with _received_signals() as signals:
            answering.add_done_callback(lambda _: signals.put_nowait(_BROKEN))  # raises below what HTTP failed of
            loading = _load(plan, config, on_failure=lambda: signals.put_nowait(_BROKEN))
            generator = await _unless(signals, loading)
            if isinstance(generator, int):
                return 1 if generator == _BROKEN else 0  # told to end before there was anything to finish
            gc.freeze()  # what is loaded stays: going through it for garbage would stop everybody for 100 ms
            service.attach(generator)
            if jobs is not None:
                jobs.worker.wake()  # goes on with what an earlier server left
            print(f"moeflow serves {generator.client.model.name} at {url(listener)}", flush=True)
            ended_by: int | None = await signals.get()
            if ended_by != _BROKEN:
                service.drain()
                if jobs is not None:
                    await jobs.close()
                ended_by = await _unless(signals, generator.client.shutdown(config.shutdown_deadline_s))
                if ended_by is None:
                    return 0
            http.force_exit = ended_by != _BROKEN  # else requests still get to know what happened
            await generator.client.shutdown(0)
            return _FORCED + ended_by if ended_by != _BROKEN else 1
    finally:
        http.should_exit = True
        await answering
        if jobs is not None:
            await jobs.close()


def _open_jobs(config: ServerConfig, service: Service) -> Jobs | None:
    """Open the data folder; without one the server does all but batch jobs."""
    if config.data_dir is None:
        return None
    try:
        return Jobs(config.data_dir, service)
    except ConfigError as error:
        print(f"warning: no /v1/files and /v1/batches: {error}", file=sys.stderr)
        return None


async def _load(plan: Plan, config: ServerConfig, *, on_failure: Callable[[], None]) -> Generator:
    """Load model and tokenizer side by side; if one fails, nothing is left of the other."""
    columns = (TextColumn(f"loading {plan.config.model_name}"), BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("load", total=None)
        starting = asyncio.create_task(
            Supervisor.start(
                plan.config,
                plan.num_replicas,
                max_restarts=config.max_engine_restarts,
                timeout_s=config.engine_timeout_s,
                on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
                on_failure=on_failure,
            )
        )
        try:
            tokenizer = await asyncio.to_thread(_load_tokenizer, plan.config.model_path)
            return Generator(await starting, tokenizer)
        except BaseException:
            starting.cancel()  # cleans up by itself, unless it had just succeeded
            with contextlib.suppress(asyncio.CancelledError, MoeflowError):
                await (await starting).shutdown(0)
            raise


def _load_tokenizer(model: str) -> Tokenizer:
    tokenizer = Tokenizer.load(model)
    tokenizer.warm_up()
    return tokenizer


async def _unless(signals: asyncio.Queue[int], work: Coroutine[Any, Any, Result]) -> Result | int:
    """Await work, or cancel it when a signal comes and return that signal."""
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(signals.get())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else waiting.result()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


@contextlib.contextmanager
def _received_signals() -> Iterator[asyncio.Queue[int]]:
    """Collect SIGTERM and SIGINT instead of dying of them."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, int(number))
    try:
        yield signals
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, and with nothing that depends on what else is installed."""

    def __init__(self, app: FastAPI, patience: Patience = PATIENCE) -> None:
        connection = functools.partial(
            Connection, patience=patience, on_refusal=app.state.service.metrics.count_refusal
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,  # type: ignore[arg-type]  # it is called, and nothing else is done with it
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # what it warns of are clients' mistakes, which have their own lines
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_FLUSH_S,
            )
        )

    async def on_tick(self, counter: int) -> bool:
        """End slow connections; uvicorn calls this ten times a second."""
        if counter % _LOOK_TICKS == 0:
            now_s = time.monotonic()
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.end_if_slow(now_s)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield
