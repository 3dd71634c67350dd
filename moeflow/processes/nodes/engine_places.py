"""Places for engines on other machines, as a server sees them: keepers connect and offer one, `launch` takes it.

One socket serves all: ZeroMQ with CURVE, whose keys come from the cluster's token. Messages of engines pass unread.
Neither knows how keepers were started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import zmq
import zmq.asyncio

from moeflow.core.address import Address, format_address
from moeflow.core.errors import ConfigError
from moeflow.core.truncated_repr import truncated
from moeflow.core.units import format_bytes
from moeflow.parallel.tcp.admission import ZAP_ADDRESS, ZAP_DOMAIN, zap_answer
from moeflow.parallel.tcp.curve_keys import CurveKeys
from moeflow.processes.deaths import Death
from moeflow.processes.engine_host import LAST_WORDS_S, EngineHost, LocalHost
from moeflow.processes.nodes.messages import (
    BEAT_S,
    GONE_S,
    LOST_S,
    SILENT_S,
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
from moeflow.processes.nodes.rank_port import RankPort
from moeflow.processes.nodes.ranks_host import RanksHost
from moeflow.processes.nodes.silence import Silence

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0  # places that exist are offered sooner

Objection = Callable[[Offer], str]


class EnginePlaces:
    """Where keepers of engines connect. Make one with `open`, end it with `close`."""

    def __init__(
        self, token: bytes, fingerprint: str, objection: Objection, awaited: str, ranks: RankPlaces | None = None
    ) -> None:
        """Nothing listens yet. `objection` returns why an offer cannot be used; empty: it can. `awaited` names the
        resources of a place, for the log. `ranks` are those of each engine.
        """
        self.ranks = ranks or RankPlaces()
        self._keys = CurveKeys.of(token)
        self._fingerprint = fingerprint
        self._objection = objection
        self._awaited = awaited
        self._context = zmq.asyncio.Context()
        self._places: dict[bytes, _Place] = {}  # by the keeper's identity
        self._waiting: deque[asyncio.Future[list[FarHost]]] = deque()  # launches
        self._lives = itertools.count(time.time_ns())  # later servers have larger ones
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromKeeper)
        self._waiting_since_s: float | None = None  # launches; None: none does, or the log has it
        self._num_keepers = 0  # of engines, that were started and have not left
        self._num_excess = 0  # of these, that are to leave
        self.host, self.port = "", 0  # once open
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, host: str, port: int = 0) -> None:
        """Listen at an address of this machine; port 0: any. Raises: ConfigError if that cannot be."""
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a keeper that connects anew is the same one
        self._socket.setsockopt(zmq.TCP_MAXRT, int(LOST_S * 1000))
        self._socket.curve_server, self._socket.zap_domain = True, ZAP_DOMAIN
        self._socket.curve_secretkey = self._keys.accepting.secret
        self._socket.curve_publickey = self._keys.accepting.public
        self._socket.ipv6 = ":" in host
        self.host = host
        try:
            self._socket.bind(f"tcp://{format_address(host, port)}")  # to port 0: any
        except zmq.ZMQError as error:
            for each in (self._zap, self._socket):
                each.close(linger=0)
            reason = error.strerror
            raise ConfigError(
                f"engines of other machines cannot join at {format_address(host, port)}: {reason}; name another "
                "address of this machine (--listen-ranks HOST:PORT)"
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._watch(), self._admit())]

    def close(self) -> None:
        """End all engines there and listen no more."""
        for place in self._places.values():
            if place.host is not None:
                place.host.kill()
        for task in self._tasks:
            task.cancel()
        for future in self._waiting:
            future.cancel()
        if self.port:
            self._zap.close(linger=0)
            self._socket.close(linger=1000)  # the last words must get out
        self._context.term()

    async def launch(self, max_num_seqs: int) -> EngineHost:
        """Take places for the ranks of an engine, and start processes there that have nothing to do yet.

        Waits: until there are as many. Raises: as `LocalHost.launch`.
        """
        hosts = self._start(self._free_group()) or await self._wait_for_places()
        if self.ranks.number == 1:
            return hosts[0]
        if not self.ranks.has_first_here:
            return RanksHost(hosts, [[host.address for host in hosts]] * len(hosts))
        with contextlib.ExitStack() as undoing:
            for host in hosts:
                undoing.callback(host.kill)
            port = undoing.enter_context(contextlib.closing(RankPort(self.host)))
            first = await LocalHost.launch(max_num_seqs)
            undoing.pop_all()
        own, others = port.address, [host.address for host in hosts]
        addresses = [[own, *others], *([(host.server, own[1]), *others] for host in hosts)]
        return RanksHost([first, *hosts], addresses, port)

    async def _wait_for_places(self) -> list[FarHost]:
        future: asyncio.Future[list[FarHost]] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._waiting_since_s = time.monotonic()
        self._waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                for host in future.result():
                    host.kill()
            with contextlib.suppress(ValueError):  # it has got places
                self._waiting.remove(future)
            raise

    def release(self) -> None:
        """Have the keepers of one engine leave, as soon as they have none."""
        self._num_excess += 1

    def add_keepers(self, number: int) -> int:
        """Have keepers of this number of further engines; return of how many they must be started, as the others have
        not left yet."""
        kept = min(number, self._num_excess)
        self._num_excess -= kept
        self._num_keepers += number - kept
        return number - kept

    def renew_keepers(self) -> int:
        """Return of how many engines keepers must be started once all have lost the process that started them."""
        self._num_keepers -= self._num_excess
        self._num_excess = 0
        return self._num_keepers

    def lose(self, host: str) -> None:
        """Take a machine for gone as soon as it is silent, as it is lost according to Ray."""
        for place in self._places.values():
            if place.offer.rank_address[0] == host:
                place.is_lost = True

    def say(self, identity: bytes, message: ToKeeper, *payload: bytes) -> None:
        """Send a message to a keeper. Never waits."""
        self._socket.send_multipart([identity, self._encoder.encode(message), *payload])

    def _free_group(self) -> list[_Place]:
        """Return places for an engine; empty: there are too few."""
        groups: dict[str, list[_Place]] = {}
        for place in self._places.values():
            if place.is_free:
                group = groups.setdefault(place.offer.group, [])
                group.append(place)
                if len(group) == self.ranks.num_keepers:
                    return group
        return []

    def _start(self, places: Sequence[_Place]) -> list[FarHost]:
        hosts = []
        for place in places:
            place.host = FarHost(self, place, next(self._lives))
            self.say(place.identity, Start(place.host.life, self._fingerprint))
            hosts.append(place.host)
        return hosts

    async def _admit(self) -> None:
        """Let in keepers of this cluster only."""
        while True:
            request = await self._zap.recv_multipart()
            await self._zap.send_multipart(zap_answer(request, self._keys.connecting.public))

    async def _read(self) -> None:
        while True:
            identity, header, *payload = await self._socket.recv_multipart()
            try:
                message = self._decoder.decode(header)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                logger.error("a keeper's message cannot be read: %s", truncated(str(error)))
                continue
            if isinstance(message, Offer):
                self._take_offer(identity, message)
            elif (place := self._places.get(identity)) is not None:
                place.silence.end()
                if isinstance(message, Leaving):
                    self._take_leaving(place, message)
                elif place.host is not None:
                    place.host.note(message, payload)
            elif isinstance(message, Beat):  # it was silent for too long, or has an engine of an earlier server
                self.say(identity, Kill(message.life))

    def _take_offer(self, identity: bytes, offer: Offer) -> None:
        place = self._places.get(identity)
        if place is None:
            if reason := self._objection(offer):
                self.say(identity, Refused(reason))
                return
            place = self._places[identity] = _Place(identity, offer)
            free = format_bytes(offer.available_bytes)
            logger.warning("%s has a place: %d threads, %s of memory free", offer.host, offer.num_threads, free)
        place.silence.end()
        if place.host is not None and (offer.last_life >= place.host.life or not place.host.is_running):
            place.host.end(Death(f"{place.name} has ended it"))
            place.host = None
        if place.host is None and (group := self._free_group()):
            self._grant(group)

    def _take_leaving(self, place: _Place, leaving: Leaving) -> None:
        host = place.host
        if host is not None and host.is_running and leaving.life == host.life:
            host.is_leaving = True
            return
        logger.warning("%s has left", place.name)
        del self._places[place.identity]
        if host is not None:
            host.end(Death(f"{place.name} has left", is_from_outside=True))

    def _grant(self, group: Sequence[_Place]) -> None:
        """Give free places to a launch that waits, or have their keepers leave if there are too many."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(self._start(group))
                return
        if self._has_too_many_places:
            self._num_excess -= 1
            self._num_keepers -= 1
            for place in group:
                self.say(place.identity, Leave())
                del self._places[place.identity]

    @property
    def _has_too_many_places(self) -> bool:
        """Whether keepers are to leave, and there are more than must stay. Others may have gone by themselves."""
        sizes = Counter(place.offer.group for place in self._places.values()).values()
        num_here = sum(size // self.ranks.num_keepers for size in sizes)
        return self._num_excess > 0 and self._num_keepers - self._num_excess < num_here

    async def _watch(self) -> None:
        """Show keepers that this server is there, and drop silent ones."""
        while True:
            self._note_waiting()
            for place in list(self._places.values()):
                place.silence.tick()
                running = place.host if place.host is not None and place.host.is_running else None
                alive = Alive(0, 0) if running is None else Alive(running.life, running.num_sent)
                self.say(place.identity, alive)
                if place.silence.duration_s > (SILENT_S if place.is_lost else GONE_S):
                    logger.error("%s is gone: silent for %.0f s", place.name, place.silence.duration_s)
                    del self._places[place.identity]
                    if place.host is not None:
                        place.host.end(Death(f"{place.name} is gone", is_from_outside=True))
            await asyncio.sleep(BEAT_S)

    def _note_waiting(self) -> None:
        """Log once what launches wait for, if it takes long."""
        if not self._waiting or self._waiting_since_s is None:
            return
        if time.monotonic() - self._waiting_since_s > PATIENCE_S:
            self._waiting_since_s = None
            number, at = len(self._waiting), format_address(self.host, self.port)
            engines = "1 engine waits" if number == 1 else f"{number} engines wait"
            places = "a place" if self.ranks.number == 1 else f"places of {self.ranks.number} ranks"
            text = "%s for %s: %s for each, on nodes that reach this server at %s"
            logger.warning(text, engines, places, self._awaited, at)


class RankPlaces(msgspec.Struct, frozen=True):
    """The ranks of each engine."""

    number: int = 1
    has_first_here: bool = False  # the first rank is a process of this machine; else each has a keeper

    @property
    def num_keepers(self) -> int:
        """Of each engine."""
        return self.number - self.has_first_here


class _Place:
    """A keeper, and the engine there."""

    def __init__(self, identity: bytes, offer: Offer) -> None:
        self.identity = identity
        self.offer = offer
        self.name = offer.host
        self.silence = Silence()
        self.is_lost = False  # according to Ray, which may have lost only its own processes there
        self.host: FarHost | None = None  # None: it is free

    @property
    def is_free(self) -> bool:
        """Whether an engine can start here now."""
        return self.host is None and self.silence.duration_s < SILENT_S


class FarHost:
    """An engine's process on another machine; see `EngineHost`."""

    def __init__(self, places: EnginePlaces, place: _Place, life: int) -> None:
        self.life = life
        self._places = places
        self._place = place
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self._has_ended = asyncio.Event()
        self._death: Death | None = None
        self._beat, self._problem = 0, ""
        self.is_leaving = False
        self.activity = ""
        self.num_sent = 0
        self._num_received = 0

    @property
    def name(self) -> str:
        """See `EngineHost`."""
        return self._place.name

    @property
    def address(self) -> Address:
        """Where its process can accept links of other ranks."""
        return self._place.offer.rank_address

    @property
    def server(self) -> str:
        """The host of this server, as its machine knows it."""
        return self._place.offer.server

    @property
    def is_running(self) -> bool:
        """See `EngineHost`."""
        return not self._has_ended.is_set()

    @property
    def problem(self) -> str:
        """See `EngineHost`."""
        silence_s = self._place.silence.duration_s
        if silence_s > SILENT_S:
            return f"{self._place.name} has been silent for {silence_s:.1f} s"
        return f"{self.name}: {self._problem}" if self._problem else ""

    def send(self, message: bytes) -> None:
        """See `EngineHost`."""
        if self.is_running:
            self._places.say(self._place.identity, Relayed(self.life, self.num_sent), message)
            self.num_sent += 1

    async def receive(self) -> bytes:
        """See `EngineHost`."""
        return await self._arrived.get()

    def look(self) -> int:
        """See `EngineHost`."""
        return self._beat

    def in_pass(self) -> Mapping[str, int]:
        """See `EngineHost`."""
        return {} if self._death is None else self._death.in_pass

    async def wait(self) -> Death | None:
        """See `EngineHost`."""
        await self._has_ended.wait()
        await asyncio.sleep(LAST_WORDS_S)
        return self._death

    def kill(self) -> None:
        """See `EngineHost`. It counts as ended at once: its machine may be out of reach."""
        self._kill("ended by the server")

    async def close(self) -> None:
        """See `EngineHost`."""
        self.kill()

    def end(self, death: Death | None) -> None:
        """It has ended."""
        if self.is_running:
            self._death = death
            self._has_ended.set()

    def note(self, message: FromKeeper, payload: list[bytes]) -> None:
        """Take a message of the keeper. One of an earlier life is ignored."""
        if isinstance(message, Offer | Leaving) or message.life != self.life or not self.is_running:
            return
        if isinstance(message, Beat) and message.number == self._num_received:
            self._beat, self._problem, self.activity = message.engine_beat, message.problem, message.activity
        elif isinstance(message, Ended):
            death = Death(
                f"{self.name}, {message.reason}", is_from_outside=message.is_from_outside, in_pass=message.in_pass
            )
            self.end(death if message.reason else None)
        elif isinstance(message, Relayed) and message.number == self._num_received and payload:
            self._num_received += 1
            self._arrived.put_nowait(payload[0])
        else:
            self._kill(f"messages of {self._place.name} were lost")

    def _kill(self, reason: str) -> None:
        if self.is_running:
            self._places.say(self._place.identity, Kill(self.life))
            self.end(Death(reason, is_from_outside=True))
