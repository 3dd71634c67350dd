"""Keeps an engine for a server on another machine: offers a place, starts the engine's process, passes messages on.

The engine itself runs as it does on the server's machine, over a local socket. The keeper ends it when the server is
gone, and offers the place again.
"""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import NoReturn

import msgspec
import zmq
import zmq.asyncio

from moeflow.core.address import format_address
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import ConfigError, MoeflowError
from moeflow.core.first_signal import on_first_signal
from moeflow.engine.ranks.own_model import in_tenths
from moeflow.parallel.tcp.curve_keys import CurveKeys
from moeflow.parallel.tcp.same_bits import OwnBits
from moeflow.planner.hardware.host import host_resources
from moeflow.processes.engine_host import LAST_WORDS_S, LocalHost
from moeflow.processes.nodes.join_settings import JoinSettings, LeftError, checked_config
from moeflow.processes.nodes.messages import (
    BEAT_S,
    GONE_S,
    LOST_S,
    Alive,
    Beat,
    Ended,
    FromKeeper,
    Kill,
    Leave,
    Leaving,
    Offer,
    Refused,
    Relayed,
    Start,
    ToKeeper,
)
from moeflow.processes.nodes.rank_port import RankPort, own_host
from moeflow.processes.nodes.silence import Silence

OnNews = Callable[[str], None]
Computing = Callable[[], AbstractContextManager[None]]


class ReleasedError(Exception):
    """The server needs this machine no more."""


class Keeper:
    """One place. `run` it."""

    def __init__(self, settings: JoinSettings, on_news: OnNews, computing: Computing = nullcontext) -> None:
        """`on_news` gets changes, in words. `computing` is entered as long as an engine runs."""
        self._settings = settings
        self._on_news = on_news
        self._computing = computing
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToKeeper)
        self._engine: _KeptEngine | None = None
        self._last_life = 0
        self._is_leaving = False
        self._silence = Silence()
        self._failure: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    def leave(self) -> None:
        """Have `run` end once the server needs the engine here no more."""
        self._is_leaving = True
        if self._engine is not None:
            self._on_news("leaving: the server moves requests to other machines; a second signal ends this one at once")

    async def run(self) -> NoReturn:
        """Keep one engine after the other, until cancelled.

        Raises: ConfigError, CheckpointError if it never can; ReleasedError if it is needed no more; LeftError after
        `leave`.
        """
        context = zmq.asyncio.Context()
        try:
            with self._connect(context) as self._socket, closing(self._reserve_port()) as self._port:
                tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]
                try:
                    await asyncio.wait((*tasks, self._failure), return_when=asyncio.FIRST_COMPLETED)
                    raise next(each for each in (*tasks, self._failure) if each.done()).exception() or AssertionError
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    if self._engine is not None:
                        self._say(Ended(self._engine.life, "its keeper has been ended", is_from_outside=True))
                    await self._end_engine()
        finally:
            context.term()

    def _reserve_port(self) -> RankPort:
        settings = self._settings
        try:
            return RankPort(own_host(settings.host, settings.port))
        except OSError as error:
            raise ConfigError(f"{settings.host} is not found: {error.strerror}") from None

    def _connect(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        settings, keys = self._settings, CurveKeys.of(self._settings.token)
        socket = context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.linger = 1000
        socket.setsockopt(zmq.ROUTING_ID, uuid.uuid4().bytes)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for a server that is not there
        socket.setsockopt(zmq.TCP_MAXRT, int(LOST_S * 1000))
        socket.curve_serverkey = keys.accepting.public
        socket.curve_publickey, socket.curve_secretkey = keys.connecting.public, keys.connecting.secret
        socket.ipv6 = ":" in settings.host
        socket.connect(self._address)
        return socket

    @property
    def _address(self) -> str:
        return f"tcp://{format_address(self._settings.host, self._settings.port)}"

    def _connect_anew(self) -> None:
        """Give up a connection that brings nothing. ZeroMQ's heartbeats would, but may abort the process at its end."""
        self._socket.disconnect(self._address)
        self._socket.connect(self._address)
        self._silence.end()

    def _say(self, message: FromKeeper, *payload: bytes) -> None:
        """Send a message; without a connection it is lost, which the other end notices."""
        sent = asyncio.ensure_future(
            self._socket.send_multipart([self._encoder.encode(message), *payload], zmq.NOBLOCK)
        )
        if sent.done():
            sent.exception()  # zmq.Again

    async def _beat(self) -> NoReturn:
        """Offer the place while it is free, else show that engine and keeper are there."""
        offer = self._offer()
        while True:
            engine = self._engine
            self._silence.tick()
            if self._silence.duration_s > LOST_S:
                self._connect_anew()
            if self._is_leaving:
                self._say(Leaving(0 if engine is None else engine.life))
                if engine is None:
                    raise LeftError("this machine has left: no engine runs here any more")
            if engine is None:
                self._say(msgspec.structs.replace(offer, last_life=self._last_life))
            else:
                self._say(Beat(engine.life, engine.beat, engine.num_sent, engine.problem, engine.activity))
                if self._silence.duration_s > GONE_S:
                    self._on_news(f"the server has been silent for {GONE_S:g} s: its engine ends")
                    await self._end_engine()
            await asyncio.sleep(BEAT_S)

    def _offer(self) -> Offer:
        settings, own = self._settings, OwnBits.of(self._settings.cpu_isa)
        return Offer(
            host=socket.gethostname(),
            software=own.software,
            processor=own.processor,
            cpu_isa=own.cpu_isa,
            num_threads=settings.threads,
            available_bytes=host_resources().available_bytes,
            group=settings.group,
            rank_address=self._port.address,
            server=settings.host,
        )

    async def _read(self) -> NoReturn:
        while True:
            header, *payload = await self._socket.recv_multipart()
            self._silence.end()
            message = self._decoder.decode(header)
            if isinstance(message, Start):
                await self._end_engine()
                self._engine = _KeptEngine(message, self._settings, self._say, self._on_news)
                self._running = asyncio.create_task(self._keep(self._engine))
            elif isinstance(message, Leave):
                raise ReleasedError("the server needs this machine no more")
            elif isinstance(message, Refused):
                raise ConfigError(f"the server cannot use {socket.gethostname()}: {message.reason}")
            elif isinstance(message, Alive) and (self._engine is None or message.life != self._engine.life):
                await self._end_engine()  # the server has ended it, but not reached this machine
                self._last_life = max(self._last_life, message.life)  # its start has not arrived
            elif self._engine is None or message.life != self._engine.life:
                continue
            elif isinstance(message, Kill):
                await self._end_engine()
            elif message.number != self._engine.num_received or (isinstance(message, Relayed) and not payload):
                self._say(Ended(message.life, "messages of the server were lost", is_from_outside=True))
                await self._end_engine()  # else requests would wait for ever
            elif isinstance(message, Relayed):
                self._engine.take(payload[0])

    async def _keep(self, engine: _KeptEngine) -> None:
        self._on_news("an engine, or a rank of one, starts")
        try:
            with self._computing():  # at its end, an orphan ends at once
                ended = await self._run(engine)
                self._say(ended)
                self._on_news(f"the engine has ended{f': {ended.reason}' if ended.reason else ''}")
                await asyncio.sleep(LAST_WORDS_S)
        finally:
            self._last_life, self._engine = engine.life, None

    async def _run(self, engine: _KeptEngine) -> Ended:
        try:
            return await engine.run()
        except MoeflowError as error:  # it is this machine that cannot: the engine may start on another
            self._failure.set_exception(error)
            return Ended(engine.life, str(error), is_from_outside=True)
        except Exception as error:  # any: the server waits for its end
            return Ended(engine.life, f"{type(error).__name__}: {error}")

    async def _end_engine(self) -> None:
        if (engine := self._engine) is not None:
            if not self._running.cancelling():  # a second time would interrupt the end of the process
                self._running.cancel()
            await asyncio.wait((self._running,))
            if self._engine is engine:  # its task had not begun
                self._last_life, self._engine = engine.life, None


class _KeptEngine:
    """One life of an engine's process."""

    def __init__(self, start: Start, settings: JoinSettings, say: Callable[..., None], on_news: OnNews) -> None:
        self.life = start.life
        self.activity = ""  # before the process starts
        self._has_ended = False
        self._log_step = in_tenths(on_news)
        self._fingerprint = start.fingerprint
        self._settings = settings
        self._say = say
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()  # messages to the engine
        self.num_sent = self.num_received = 0  # messages of the engine, and to it
        self._host: LocalHost | None = None

    @property
    def beat(self) -> int:
        """See `EngineHost.look`."""
        return 0 if self._host is None else self._host.look()

    @property
    def problem(self) -> str:
        """See `EngineHost.problem`."""
        return "" if self._host is None else self._host.problem

    def take(self, message: bytes) -> None:
        """Take a message to the engine."""
        self.num_received += 1
        self._arrived.put_nowait(message)

    async def run(self) -> Ended:
        """Run the process until it ends. Raises: see `checked_config`."""
        try:
            return await self._run()
        finally:
            self._has_ended = True  # a thread may still bring the model

    def _note_step(self, step: str, done: int, total: int) -> None:
        """Report progress, from any thread. Raises: LeftError once the server no longer needs it."""
        if self._has_ended:
            raise LeftError("the server needs this engine no more")
        self._log_step(step, done, total)
        self.activity = f"{step}: {100 * done // max(total, 1)}%"

    async def _run(self) -> Ended:
        config = msgspec.msgpack.decode(await self._arrived.get(), type=EngineConfig)
        config = await asyncio.to_thread(checked_config, config, self._fingerprint, self._settings, self._note_step)
        self.activity = ""
        self._host = host = await LocalHost.launch(config.scheduler.max_num_seqs)
        host.send(msgspec.msgpack.encode(config))
        relaying = [asyncio.create_task(work) for work in (self._relay_to(host), self._relay_from(host))]
        try:
            death = await host.wait()
            if death is None:
                return Ended(self.life, "")
            return Ended(self.life, death.reason, death.is_from_outside, dict(host.in_pass()))
        finally:
            for task in relaying:
                task.cancel()
            await asyncio.gather(*relaying, return_exceptions=True)
            self._host = None  # a closed one has no heartbeat
            await host.close()

    async def _relay_to(self, host: LocalHost) -> NoReturn:
        while True:
            host.send(await self._arrived.get())

    async def _relay_from(self, host: LocalHost) -> NoReturn:
        while True:
            message = await host.receive()
            self._say(Relayed(self.life, self.num_sent), message)
            self.num_sent += 1


def keep_engines(settings: JoinSettings, on_news: OnNews) -> None:
    """Keep engines for a server until it needs this machine no more.

    Raises: ConfigError, CheckpointError; LeftError after the first signal.
    """
    try:
        run_keeper(settings, on_news)
    except ReleasedError as error:
        on_news(str(error))


def run_keeper(settings: JoinSettings, on_news: OnNews, computing: Computing = nullcontext) -> NoReturn:
    """Keep engines until the first signal, then leave. Raises: see `Keeper.run`."""

    async def run() -> NoReturn:
        keeper = Keeper(settings, on_news, computing)
        with on_first_signal(keeper.leave):
            await keeper.run()

    asyncio.run(run())
    raise AssertionError
