"""Places of keepers whose messages a test writes itself: no engine runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from unittest.mock import AsyncMock

import msgspec
import pytest
import zmq
import zmq.asyncio

from moeflow.core.errors import ConfigError
from moeflow.parallel.tcp.curve_keys import CurveKeys
from moeflow.processes.nodes import engine_places
from moeflow.processes.nodes.engine_places import EnginePlaces, RankPlaces
from moeflow.processes.nodes.messages import (
    BEAT_S,
    Alive,
    Beat,
    FromKeeper,
    Kill,
    Leave,
    Offer,
    Relayed,
    Start,
    ToKeeper,
)
from moeflow.processes.nodes.silence import Silence
from tests.patience import PATIENCE_S

TOKEN = b"0123456789abcdef" * 2
FREE = Offer("node", "moeflow", "x86", "avx2", num_threads=1, available_bytes=1)


class RawKeeper:
    """One end of a keeper's connection."""

    def __init__(self, port: int) -> None:
        keys = CurveKeys.of(TOKEN)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, uuid.uuid4().bytes)
        self._socket.curve_serverkey = keys.accepting.public
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.connecting.public, keys.connecting.secret
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def close(self) -> None:
        self._socket.close(linger=0)

    async def say(self, message: FromKeeper, *payload: bytes) -> None:
        await self.say_raw(msgspec.msgpack.encode(message), *payload)

    async def say_raw(self, *frames: bytes) -> None:
        await self._socket.send_multipart(frames)

    async def hear(self, condition: Callable[[ToKeeper], bool]) -> ToKeeper:
        """Return the next message that meets a condition."""
        while True:
            message = msgspec.msgpack.decode((await self._socket.recv_multipart())[0], type=ToKeeper)
            if condition(message):
                return message

    async def hear_a(self, kind: type) -> ToKeeper:
        return await self.hear(lambda message: isinstance(message, kind))


@contextlib.asynccontextmanager
async def opened(ranks: RankPlaces | None = None) -> AsyncIterator[tuple[EnginePlaces, Callable[[], RawKeeper]]]:
    places = EnginePlaces(TOKEN, "fingerprint", lambda offer: "", "8 free CPUs", ranks)
    places.open("127.0.0.1")
    raw: list[RawKeeper] = []

    def make() -> RawKeeper:
        raw.append(RawKeeper(places.port))
        return raw[-1]

    try:
        yield places, make
    finally:
        for each in raw:
            each.close()
        places.close()


def run(body) -> None:
    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))


def test_a_pause_of_this_process_is_no_silence():
    now_s = 0.0
    silence = Silence(lambda: now_s)
    for _ in range(3):
        now_s += 0.4
        silence.tick()
    assert silence.duration_s == pytest.approx(1.2)
    now_s += 60.0
    assert silence.duration_s == pytest.approx(2.0)
    silence.tick()
    now_s += 0.4
    assert silence.duration_s == pytest.approx(2.4)
    silence.end()
    assert silence.duration_s == 0.0


def test_keepers_stay_while_the_server_is_blocked(monkeypatch):
    for limit in ("SILENT_S", "GONE_S"):
        monkeypatch.setattr(engine_places, limit, 2.0)

    async def body():
        async with opened() as (places, make):
            raw = make()
            await raw.say(FREE)
            host = await places.launch(1)
            start = await raw.hear_a(Start)
            await raw.say(Beat(start.life, 1, 0))
            await raw.hear_a(Alive)
            await raw.say(Beat(start.life, 2, 0))
            time.sleep(2.2)  # blocks the event loop
            assert not host.problem
            while host.look() != 2:
                await asyncio.sleep(0.01)
            assert host.is_running
            await raw.say(Beat(start.life, 3, 0, activity="pulling o/m: 40%"))
            while host.activity != "pulling o/m: 40%":
                await asyncio.sleep(0.01)

    run(body)


def test_a_machine_that_ray_has_lost_is_gone_once_it_is_silent(monkeypatch):
    monkeypatch.setattr(engine_places, "GONE_S", 2 * PATIENCE_S)

    async def body():
        async with opened() as (places, make):
            lost, other = make(), make()
            hosts = []
            for raw, address in ((lost, "10.0.0.1"), (other, "10.0.0.2")):
                await raw.say(msgspec.structs.replace(FREE, host=address, rank_address=(address, 1)))
                hosts.append(await places.launch(1))
            places.lose("10.0.0.1")
            for number in range(5):  # only Ray's own processes may have ended there
                await lost.say(Beat(hosts[0].life, number, 0))
                await asyncio.sleep(BEAT_S)
            assert [host.is_running for host in hosts] == [True, True]
            death = await hosts[0].wait()
            assert death is not None
            assert (death.reason, death.is_from_outside) == ("10.0.0.1 is gone", True)
            assert hosts[1].is_running

    run(body)


def test_an_engine_of_ranks_gets_places_of_one_group():
    async def body():
        async with opened(RankPlaces(2)) as (places, make):
            raw = [make() for _ in range(4)]
            launch = asyncio.create_task(places.launch(1))
            for each, group in zip(raw[:3], "abc", strict=True):
                await each.say(msgspec.structs.replace(FREE, group=group))
                await each.hear_a(Alive)
            assert not launch.done()
            await raw[3].say(msgspec.structs.replace(FREE, group="b"))
            for each in (raw[1], raw[3]):
                await each.hear_a(Start)
            (await launch).kill()
            places.add_keepers(1)
            places.release()  # once the engine has ended
            for each in (raw[1], raw[3]):
                await each.hear_a(Kill)
                await each.say(msgspec.structs.replace(FREE, group="b"))
            for each in (raw[1], raw[3]):
                await each.hear_a(Leave)

    run(body)


def test_first_ranks_here_have_a_port_each(monkeypatch):
    """A machine that leaves finishes its requests while the next engine already starts."""

    async def launch(max_num_seqs: int) -> AsyncMock:
        if max_num_seqs == 0:
            raise ConfigError("no place for the socket")
        return AsyncMock()

    monkeypatch.setattr(engine_places.LocalHost, "launch", launch)

    async def body():
        async with opened(RankPlaces(2, has_first_here=True)) as (places, make):
            raw = [make() for _ in range(3)]
            for each in raw:
                await each.say(FREE)
                await each.hear_a(Alive)
            hosts = [await places.launch(1) for _ in range(2)]
            hosts[0]._first.activity = ""
            for each in raw[:2]:
                life = (await each.hear_a(Start)).life
                await each.say(Beat(life, 0, 0, activity="pulling o/m: 40%"))
            while hosts[0].activity != "rank 1 on node: pulling o/m: 40%":
                await asyncio.sleep(0.01)
            assert len({host._port.address for host in hosts}) == 2
            for host in hosts:
                await host.close()
                assert host._port._socket.fileno() == -1
            with pytest.raises(ConfigError):
                await places.launch(0)
            await raw[2].hear_a(Kill)

    run(body)


def test_what_cannot_be_read_ends_nothing(caplog):
    async def body():
        async with opened() as (places, make):
            raw = make()
            for frame in (b"", b"\xc1", msgspec.msgpack.encode(FREE).replace(b"node", b"\xff\xfe\xff\xfe")):
                await raw.say_raw(frame)
            await raw.say(Relayed(1, 0))  # of a keeper that has offered nothing
            await raw.say(FREE)
            assert (await places.launch(1)).name == "node"

    run(body)
    assert caplog.text.count("a keeper's message cannot be read") == 3


def test_lost_messages_are_noticed():
    async def body():
        async with opened() as (places, make):
            raw = make()
            await raw.say(FREE)
            host = await places.launch(1)
            life = (await raw.hear_a(Start)).life
            host.send(b"configuration")
            await raw.hear(lambda message: message == Alive(life, 1))
            await raw.say(Relayed(life, 0), b"loading")
            await raw.say(Beat(life, 1, 1))
            while host.look() != 1:
                await asyncio.sleep(0.01)
            await raw.say(Beat(life, 2, 2))  # a second message has not arrived
            await raw.hear(lambda message: message == Kill(life))
            await raw.hear(lambda message: message == Alive(0, 0))  # in case that the last one is lost, too
            death = await host.wait()
            assert death is not None
            assert death.reason == "messages of node were lost"

            await raw.say(FREE)  # as a keeper that the start has not reached
            assert (await places.launch(1)).is_running

            stranger = make()  # with an engine of an earlier server
            await stranger.say(Beat(7, 1, 0))
            assert await stranger.hear_a(Kill) == Kill(7)

    run(body)


def test_a_launch_that_is_cancelled_leaves_nothing():
    async def body():
        async with opened() as (places, make):
            launches = [asyncio.create_task(places.launch(1)) for _ in range(3)]
            await asyncio.sleep(0)
            for launch in launches[:2]:
                launch.cancel()
            await asyncio.gather(*launches[:2], return_exceptions=True)
            assert len(places._waiting) == 1
            await make().say(FREE)
            assert (await launches[2]).is_running

    run(body)


def test_the_number_of_keepers_follows_that_of_engines():
    async def body():
        async with opened() as (places, make):
            assert places.add_keepers(3) == 3
            places.release()
            places.release()
            assert places.add_keepers(1) == 0  # one of those stays
            raw = [make() for _ in range(3)]
            for each in raw[:2]:
                await each.say(FREE)
                await each.hear_a(Alive)  # the third has gone by itself
            await raw[2].say(FREE)
            await raw[0].hear_a(Leave)
            assert places.add_keepers(2) == 2
            assert places.renew_keepers() == 4
            places.release()
            assert places.renew_keepers() == 3
            assert places.add_keepers(1) == 1

    run(body)


def test_the_log_names_the_missing_place(monkeypatch, caplog):
    monkeypatch.setattr(engine_places, "PATIENCE_S", 0.2)
    monkeypatch.setattr(engine_places, "BEAT_S", 0.05)

    async def body():
        async with opened() as (places, make):
            launches = [asyncio.create_task(places.launch(1)) for _ in range(2)]
            while "wait for a place" not in caplog.text:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            for _ in launches:
                await make().say(FREE)
            await asyncio.gather(*launches)

    with caplog.at_level(logging.WARNING):
        run(body)
    assert caplog.text.count("wait for a place") == 1
    assert (
        "2 engines wait for a place: 8 free CPUs for each, on nodes that reach this server at 127.0.0.1:" in caplog.text
    )
