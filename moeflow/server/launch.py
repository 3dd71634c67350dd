"""Starts everything in the right order and ends it in the right order: socket, model, HTTP, engine process; signals.

HTTP answers from the start ("loading"), so that probes and the page can see how far it is. The first SIGTERM
or Ctrl-C lets running requests finish within the deadline, the second ends at once. When the engine dies for good, so
does the server, for whatever watches it to start it again. Where there are several models, each is loaded when it is
asked for, and the server outlives their engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from moeflow.core.errors import ConfigError
from moeflow.core.plan import Plan
from moeflow.engine.generator import Generator
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.plan_text import what_to_expect
from moeflow.server.config import ServerConfig
from moeflow.server.extras import require_extra
from moeflow.server.guard.key_file import read_key_file
from moeflow.server.listener import listen, url
from moeflow.server.loading import give_up, load_model
from moeflow.server.logs import announcement
from moeflow.server.open_connections import max_connections, raise_descriptor_limit
from moeflow.server.tls import tls_context
from moeflow.server.tracing_choice import is_tracing_wanted

if TYPE_CHECKING:
    from fastapi import FastAPI

    from moeflow.processes.supervisor import Supervisor
    from moeflow.server.service import Service

with on_demand(__name__):
    from moeflow.server import app as web_app
    from moeflow.server import http_server, model_pool, served_model, tracing
    from moeflow.server.fronts import fronted_server, fronts
    from moeflow.server.jobs import data_folder
    from moeflow.server.rpc import rpc_server

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class PlannedModel(NamedTuple):
    """One of several models."""

    path: str
    plan: Callable[[], Plan]  # called in a thread, each time that the model is loaded
    max_model_len: int | None = None  # that the user set


PlanMore = Callable[[str, str], tuple[str, PlannedModel]]  # name and path to the served name, and how it is planned

_BROKEN = 0  # among signals: the engine or HTTP has failed
_FORCED = 128  # shells' way to say "ended by signal": 128 + its number


def serve(plan: Callable[[], Plan], config: ServerConfig) -> int:
    """Serve until a signal or the engine's death ends it; return the exit code: 0 after an orderly end, else 1.

    `plan` returns what to run and may take minutes to make the model it names: the port is taken before.

    Blocks: until then.
    Raises: ConfigError for host or port; whatever keeps the model from loading.
    """
    _check_files(config)
    tracer = _tracer_of(config)
    with (
        surviving_hangups(config),
        listen(config) as listener,
        contextlib.closing(tracer) if tracer else contextlib.nullcontext(),
    ):
        decided = plan()
        if expected := what_to_expect(decided):
            print(expected, file=sys.stderr)
        _warn_if_open(config)
        return asyncio.run(_serve(listener, decided, config, tracer))


def serve_several(
    models: Mapping[str, PlannedModel],
    budget_bytes: int,
    config: ServerConfig,
    plan_more: PlanMore | None = None,
) -> int:
    """Serve several models, by their names, likewise; each is loaded when a request asks for it.

    `budget_bytes` is the total memory of loaded models. `plan_more` plans models that are added later.

    Blocks: until a signal ends it.
    Raises: ConfigError for host or port.
    """
    if config.num_fronts > 1:
        raise ConfigError("several fronts serve one model: start one server for each model, or leave out --fronts")
    _check_files(config)
    tracer = _tracer_of(config)
    with (
        surviving_hangups(config),
        listen(config) as listener,
        contextlib.closing(tracer) if tracer else contextlib.nullcontext(),
    ):
        _warn_if_open(config)
        return asyncio.run(_serve_several(listener, models, budget_bytes, config, tracer, plan_more))


def _check_files(config: ServerConfig) -> None:
    """Look for small files and packages, so that a mistake is known at once. Raises: ConfigError."""
    tls_context(config)
    if config.grpc_port is not None:
        require_extra("grpc", ("grpc", "grpc_health"), "gRPC (--grpc-port) needs grpcio and grpcio-health-checking")
        listen(config, config.grpc_port).close()
    if config.api_keys_file is not None:
        read_key_file(config.api_keys_file)


def _tracer_of(config: ServerConfig) -> tracing.RequestTracer | None:
    return tracing.RequestTracer(config.otlp_endpoint) if is_tracing_wanted(config.otlp_endpoint) else None


def _warn_if_open(config: ServerConfig) -> None:
    if not config.is_loopback and not config.needs_key:
        print(f"warning: everybody who can reach {config.host} may use this server; set an API key", file=sys.stderr)


def _announce(models: str, listener: socket.socket, rpc: rpc_server.RpcServer | None, config: ServerConfig) -> None:
    """Print the models and the addresses."""
    address = url(listener, has_tls=config.tls_cert is not None)
    message = f"moeflow serves {models} at {address}"
    fields = {"models": models, "url": address}
    if rpc is not None:
        message += f" and by gRPC at {rpc.address}"
        fields["grpc"] = rpc.address
    print(announcement(config.log_format, message, **fields), flush=True)


async def _serve_several(
    listener: socket.socket,
    models: Mapping[str, PlannedModel],
    budget_bytes: int,
    config: ServerConfig,
    tracer: tracing.RequestTracer | None,
    plan_more: PlanMore | None,
) -> int:
    def source_of(name: str, model: PlannedModel) -> served_model.ModelSource:
        prepare = partial(_prepare, model.plan, config)
        return served_model.ModelSource(name, model.path, prepare, model.max_model_len)

    pool = model_pool.ModelPool(
        [source_of(name, model) for name, model in models.items()],
        max_queue=config.max_queue,
        budget_bytes=budget_bytes,
        source_of=None if plan_more is None else lambda name, path: source_of(*plan_more(name, path)),
    )
    with _received_signals() as signals:
        app = web_app.create_app(None, config, tracer.trace if tracer else None, pool=pool)
        jobs = app.state.jobs = _open_jobs(config, app.state.service)
        http = _http_server(app)
        async with _answering(http, jobs, listener, signals) as rpc:
            if jobs is not None:
                jobs.worker.wake()
            _announce(", ".join(models), listener, rpc, config)
            return await _until_end(http, jobs, signals, config)


def _http_server(app: FastAPI) -> http_server.HttpServer:
    return http_server.HttpServer(app, max_connections=_max_connections(app.state.service.config))


def _max_connections(config: ServerConfig) -> int:
    """Return how many connections to each port may be open."""
    return max_connections(raise_descriptor_limit(), num_ports=1 if config.grpc_port is None else 2)


def _prepare(plan: Callable[[], Plan], config: ServerConfig) -> served_model.Loadable:
    decided = plan()

    async def load(on_failure: Callable[[], None]) -> Generator:
        return await load_model(decided, config, on_failure=on_failure)

    return served_model.Loadable(decided.memory_bytes, load, decided)


async def _serve(
    listener: socket.socket, plan: Plan, config: ServerConfig, tracer: tracing.RequestTracer | None
) -> int:
    with _received_signals() as signals:
        starting: list[Supervisor] = []
        loading = asyncio.create_task(
            load_model(plan, config, on_failure=lambda: signals.put_nowait(_BROKEN), on_begun=starting.append)
        )
        try:
            await asyncio.to_thread(_import_http)  # takes as long as the engine's process needs to load
            http = _one_model_server(plan, config, tracer)
            http.service.show_start(starting, plan)
            jobs = http.app.state.jobs = _open_jobs(config, http.service)
        except BaseException:
            await give_up(loading, lambda generator: generator.client.shutdown(0))
            raise
        return await _answer(http, jobs, listener, signals, loading, config)


def _one_model_server(plan: Plan, config: ServerConfig, tracer: tracing.RequestTracer | None) -> http_server.HttpServer:
    on_request_end = tracer.trace if tracer else None
    if config.num_fronts == 1:
        return _http_server(web_app.create_app(None, config, on_request_end))
    several = fronts.Fronts(config.num_fronts, plan.config.model_path)
    pool = model_pool.ModelPool(max_queue=config.max_queue, occupancy=several.occupancy)
    app = web_app.create_app(None, config, on_request_end, pool=pool)
    return fronted_server.FrontedServer(app, several, max_connections=_max_connections(config))


async def _answer(
    http: http_server.HttpServer,
    jobs: data_folder.Jobs | None,
    listener: socket.socket,
    signals: asyncio.Queue[int],
    loading: asyncio.Task[Generator],
    config: ServerConfig,
) -> int:
    """Answer until a signal or the engine's death ends it; return the exit code."""
    async with _answering(http, jobs, listener, signals) as rpc:
        generator = await _unless(signals, _attached(http, loading))
        if isinstance(generator, int):
            await http.service.models.shutdown(0)
            return 1 if generator == _BROKEN else 0  # told to end before there was anything to finish
        if jobs is not None:
            jobs.worker.wake()  # resumes jobs of an earlier server
        _announce(generator.client.model.name, listener, rpc, config)
        return await _until_end(http, jobs, signals, config)


async def _attached(http: http_server.HttpServer, loading: asyncio.Task[Generator]) -> Generator:
    generator = await loading
    gc.freeze()  # loaded objects stay: searching them for garbage would stop all requests for 100 ms
    await http.attach(generator)
    return generator


async def _until_end(
    http: http_server.HttpServer, jobs: data_folder.Jobs | None, signals: asyncio.Queue[int], config: ServerConfig
) -> int:
    """Wait for a signal or an engine's death and end all engines; return the exit code."""
    service: Service = http.service
    ended_by: int | None = await signals.get()
    if ended_by != _BROKEN:
        http.drain()
        if jobs is not None:
            await jobs.close()
        ended_by = await _unless(signals, service.models.shutdown(config.shutdown_deadline_s))
        if ended_by is None:
            return 0
    http.force_exit = ended_by != _BROKEN  # else requests still get to know what happened
    await service.models.shutdown(0)
    return _FORCED + ended_by if ended_by != _BROKEN else 1


@contextlib.asynccontextmanager
async def _answering(
    http: http_server.HttpServer,
    jobs: data_folder.Jobs | None,
    listener: socket.socket,
    signals: asyncio.Queue[int],
) -> AsyncIterator[rpc_server.RpcServer | None]:
    """Answer requests meanwhile, by HTTP and by gRPC if there is a port for it; SIGHUP has files read again."""
    rpc, port = None, http.service.config.grpc_port
    if port is not None:
        rpc = rpc_server.RpcServer(http.app, port, _max_connections(http.service.config))
        await rpc.start()
    with reloading(http, rpc):
        answering = asyncio.create_task(http.serve(sockets=[listener]))
        answering.add_done_callback(lambda _: signals.put_nowait(_BROKEN))  # raises below what HTTP failed of
        try:
            yield rpc
        finally:
            http.should_exit = True
            http.drain()  # ends the health streams of gRPC
            if rpc is not None:
                await rpc.stop(0 if http.force_exit else http_server.FLUSH_S)
            await answering
            await http.service.close()
            if jobs is not None:
                await jobs.close()


def _import_http() -> tuple[object, ...]:
    """Import what HTTP needs, by naming something of each."""
    return web_app.create_app, http_server.HttpServer, data_folder.Jobs


def _open_jobs(config: ServerConfig, service: Service) -> data_folder.Jobs | None:
    """Open the data folder; without one the server does all but batch jobs."""
    if config.data_dir is None:
        return None
    try:
        return data_folder.Jobs(config.data_dir, service)
    except ConfigError as error:
        print(f"warning: no /v1/files and /v1/batches: {error}", file=sys.stderr)
        return None


async def _unless(
    signals: asyncio.Queue[int], work: Coroutine[Any, Any, Result] | asyncio.Task[Result]
) -> Result | int:
    """Await work, or cancel it when a signal comes and return that signal."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.create_task(signals.get())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return waiting.result()
        if waiting.done():  # both came at once: the signal is for what follows
            signals.put_nowait(waiting.result())
        return working.result()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


@contextlib.contextmanager
def surviving_hangups(config: ServerConfig) -> Iterator[None]:
    """Have SIGHUP do nothing yet where there are keys or a certificate: a server that starts reads them later."""
    if not _has_files(config):
        yield
        return
    earlier = signal.signal(signal.SIGHUP, lambda *_: None)  # SIG_IGN would hold in the engine's process, too
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, earlier)


def _has_files(config: ServerConfig) -> bool:
    return config.api_keys_file is not None or config.tls_cert is not None


@contextlib.contextmanager
def reloading(http: http_server.HttpServer, rpc: rpc_server.RpcServer | None = None) -> Iterator[None]:
    """Have SIGHUP read keys and certificate again where there are some; else it ends the process, as usual."""
    if not _has_files(http.service.config):
        yield
        return

    def reload() -> None:
        try:
            http.reload()
            if rpc is not None:
                rpc.reload()
            logger.info("API keys and certificate are read again")
        except ConfigError as error:
            logger.error("reload failed, and the earlier files stay in use: %s", error)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


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
