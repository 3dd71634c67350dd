"""Engines of keepers: the same tokens, through kills and silence on either side."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from moeflow.checkpoint.identity import fingerprint_of
from moeflow.core.engine_messages import Submission
from moeflow.core.errors import CheckpointError, ConfigError, EngineError, HubError
from moeflow.core.parallel_config import ParallelConfig
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.client import EngineState
from moeflow.planner.resolve import resolve
from moeflow.processes import process_client, replica_target
from moeflow.processes import supervisor as supervisor_module
from moeflow.processes.nodes import engine_places, keeper
from moeflow.processes.nodes.engine_places import EnginePlaces, RankPlaces
from moeflow.processes.nodes.keeper import JoinSettings, Keeper, LeftError, run_keeper
from moeflow.processes.nodes.messages import BEAT_S, Ended
from moeflow.processes.process_client import ProcessEngine
from moeflow.processes.replica_target import ReplicaTarget
from moeflow.processes.restart_limits import RestartLimits
from moeflow.processes.supervisor import Supervisor
from moeflow.settings.settings import Settings
from tests.checkpoint.hub.hub_server import hub_of_this_process
from tests.packed import pack_beside
from tests.patience import PATIENCE_S
from tests.processes.test_process import in_this_process
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.slow

TOKEN = b"0123456789abcdef" * 2
NUM_TOKENS = 400
LONG = 1500


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, max_position_embeddings=2048)
    pack_beside(folder)  # so that engines import no torch
    return resolve(Settings(model=str(folder), cache_dir=folder, num_threads=1, max_num_seqs=4)).config


@pytest.fixture(scope="module")
def want(config) -> list[int]:
    """Return the tokens of an engine in this process."""
    (tokens,) = in_this_process(config, [submission(number=LONG)])
    return tokens


def submission(name: str = "request", number: int = NUM_TOKENS) -> Submission:
    return Submission(name, [5, 6, 7], SamplingParams(max_tokens=number, temperature=0, ignore_eos=True), seed=0)


async def tokens_of(engine: ProcessEngine | Supervisor, disturb=None, name="request", number=NUM_TOKENS) -> list[int]:
    tokens: list[int] = []
    async for output in engine.stream(submission(name, number)):
        if disturb is not None and len(tokens) > NUM_TOKENS // 8:
            disturb()
            disturb = None
        tokens += output.token_ids
    return tokens


async def num_cached(supervisor: Supervisor, token: int) -> int:
    """Return the cached tokens of a prompt of 100 equal ones."""
    asked = msgspec.structs.replace(submission(number=1), prompt_token_ids=100 * [token])
    return [output.num_cached_tokens async for output in supervisor.stream(asked)][-1]


class Cluster:
    """A server's places and keepers, all in this process."""

    def __init__(self, config, token: bytes = TOKEN, ranks: RankPlaces | None = None) -> None:
        self.config = config
        fingerprint = fingerprint_of(config.model_path)
        self.places = EnginePlaces(token, fingerprint, lambda offer: self.objection, "free CPUs", ranks)
        self.objection = ""
        self.news: list[str] = []
        self.keepers: list[asyncio.Task[None]] = []
        self.kept: list[Keeper] = []

    def keep(self, **changes) -> asyncio.Task[None]:
        settings = {"host": "127.0.0.1", "port": self.places.port, "token": TOKEN, "num_threads": 1} | changes
        self.kept.append(Keeper(JoinSettings(**settings), self.news.append))
        task = asyncio.create_task(self.kept[-1].run())
        self.keepers.append(task)
        return task

    def supervisor(
        self, number: int, launcher: Launcher | None = None, target: ReplicaTarget | None = None
    ) -> Supervisor:
        start = partial(ProcessEngine.start, self.config, launch=self.places.launch)
        known = {"scheduler": self.config.scheduler, "places": self.places, "launcher": launcher, "target": target}
        return Supervisor([start] * number, RestartLimits, **known)


@contextlib.asynccontextmanager
async def cluster(config, **changes) -> AsyncIterator[Cluster]:
    made = Cluster(config, **changes)
    made.places.open("127.0.0.1")
    try:
        yield made
    finally:
        for task in made.keepers:
            task.cancel()
        await asyncio.gather(*made.keepers, return_exceptions=True)
        made.places.close()


def run(body) -> None:
    """Run a scenario; afterwards no process may be left."""
    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))
    assert not engines()


def engines() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "moeflow.processes.main" in each.cmdline():
                found.append(each)
    return sorted(found, key=lambda it: it.pid)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_streams_go_on_elsewhere_when_an_engine_is_killed(config, want):
    async def body():
        async with cluster(config) as made:
            supervisor = made.supervisor(2)
            made.keep()
            await supervisor.load()
            assert await tokens_of(supervisor) == want[:NUM_TOKENS]
            assert [each.state for each in supervisor.replicas()] == [EngineState.READY, EngineState.RESTARTING]

            made.keep()  # the second begins once it has a place
            await until(lambda: {each.state for each in supervisor.replicas()} == {EngineState.READY})

            def kill() -> None:
                busy = next(it for it in supervisor._replicas if list(it.requests))
                victim = engines()[supervisor._replicas.index(busy)]
                os.kill(victim.pid, signal.SIGKILL)

            assert await tokens_of(supervisor, kill) == want[:NUM_TOKENS]
            await until(lambda: {each.state for each in supervisor.replicas()} == {EngineState.READY})
            assert supervisor.stats().engine_restarts_total == 1
            await supervisor.shutdown(5)

    run(body)


def rank_of(process: psutil.Process) -> int:
    """Return the rank that a process has; it connects to those before it and listens for those after it."""
    listening = {each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN}
    return 0 if any(each.laddr.port in listening and each.raddr for each in process.net_connections()) else 1


def test_a_lost_rank_ends_only_its_engine(config):
    sharing = dataclasses.replace(config, parallel=ParallelConfig(num_ranks=2, expert_layout="sliced"))

    async def body():
        async with cluster(sharing, ranks=RankPlaces(2)) as made:
            local = await ProcessEngine.start(config)
            want = await tokens_of(local)
            await local.shutdown(5)

            supervisor = made.supervisor(2)
            for group in "abab":
                made.keep(group=group)
            await supervisor.load()
            await until(lambda: {each.state for each in supervisor.replicas()} == {EngineState.READY})
            assert len(engines()) == 4
            assert await tokens_of(supervisor) == want
            stats = next(each.stats for each in supervisor.replicas() if each.stats.ranks)
            assert [rank.host for rank in stats.ranks] == ["", "127.0.0.1"]
            before = {each.pid for each in engines()}

            def kill() -> None:
                os.kill(next(each.pid for each in engines() if rank_of(each) == 1), signal.SIGKILL)

            assert await tokens_of(supervisor, kill) == want
            await until(lambda: {each.state for each in supervisor.replicas()} == {EngineState.READY})
            assert len(before & {each.pid for each in engines()}) == 2
            assert supervisor.stats().engine_restarts_total == 1
            await supervisor.shutdown(5)

    run(body)


def test_a_keeper_that_goes_or_stops_is_noticed(config, monkeypatch):
    monkeypatch.setattr(engine_places, "GONE_S", 4.0)

    async def body():
        async with cluster(config) as made:
            supervisor = made.supervisor(1)
            made.keep()
            await supervisor.load()
            want = await tokens_of(supervisor)
            made.keep()

            def end() -> None:
                made.keepers[0].cancel()

            assert await tokens_of(supervisor, end) == want
            assert supervisor.stats().engine_restarts_total == 1
            await supervisor.shutdown(5)

    run(body)


def test_a_machine_that_leaves_hands_its_streams_over_or_finishes_them(config, want, caplog, monkeypatch):
    monkeypatch.setattr(process_client, "WATCH_S", 0.01)
    monkeypatch.setattr(keeper, "BEAT_S", 0.01)

    async def body():
        async with cluster(config) as made:
            supervisor = made.supervisor(1)
            first = made.keep()
            await supervisor.load()
            assert (
                await tokens_of(supervisor, made.kept[0].leave, number=LONG) == want
            )  # no other machine could continue it
            with pytest.raises(LeftError, match="has left"):
                await first
            assert [each.state for each in supervisor.replicas()] == [EngineState.RESTARTING]

            second, third = made.keep(), made.keep()
            supervisor.scale(2)
            await until(lambda: {each.state for each in supervisor.replicas()} == {EngineState.READY})
            moved: list[asyncio.Task[bool]] = []

            async def is_moved(busy) -> bool:
                await until(lambda: not list(busy.requests))
                return any(list(it.requests) for it in supervisor._replicas)

            def leave() -> None:
                busy = next(it for it in supervisor._replicas if list(it.requests))
                moved.append(asyncio.create_task(is_moved(busy)))
                next(it for it in made.kept if it._engine and it._engine.life == busy.engine._host.life).leave()

            assert await tokens_of(supervisor, leave, number=LONG) == want
            assert await moved[0]
            with pytest.raises(LeftError):
                await next(iter((await asyncio.wait((second, third), return_when=asyncio.FIRST_COMPLETED))[0]))
            assert sorted(each.state for each in supervisor.replicas()) == [EngineState.READY, EngineState.RESTARTING]
            assert supervisor.stats().engine_restarts_total == 0  # nothing has died
            await supervisor.shutdown(5)

    run(body)
    assert "leaves" in caplog.text
    assert "is gone" not in caplog.text


@pytest.mark.thorough
def test_a_machine_that_leaves_while_it_loads_starts_elsewhere(config):
    async def body():
        async with cluster(config) as made:
            supervisor = made.supervisor(2)
            made.keep()
            await supervisor.load()
            task = made.keep()
            await until(lambda: made.kept[1]._engine is not None)
            made.kept[1].leave()
            with pytest.raises(LeftError):
                await task
            made.keep()
            await until(lambda: {each.state for each in supervisor.replicas()} == {EngineState.READY})
            await supervisor.shutdown(5)

    run(body)


def test_a_signal_ends_a_keeper_without_an_engine_at_once():
    settings = JoinSettings(host="127.0.0.1", port=1, token=TOKEN, num_threads=1)
    before = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(LeftError):
        run_keeper(settings, pytest.fail)
    assert signal.getsignal(signal.SIGTERM) is before


class Launcher:
    """Stands for Ray: starts keepers in this process."""

    def __init__(self, made: Cluster) -> None:
        self.start_more = lambda number: [made.keep() for _ in range(number)]

    async def unless_refused(self, start) -> None:
        await start

    async def close(self) -> None:
        pass


def test_replicas_are_added_and_removed_under_a_stream(config):
    async def body():
        async with cluster(config) as made:
            supervisor = made.supervisor(1, Launcher(made))
            made.keep()
            await supervisor.load()
            want = await tokens_of(supervisor)

            supervisor.scale(3)
            await until(lambda: [it.state for it in supervisor.replicas()] == 3 * [EngineState.READY])
            assert {it.host for it in supervisor.replicas()} == {socket.gethostname()}
            streams = [asyncio.create_task(tokens_of(supervisor, name=f"{number}")) for number in range(6)]
            await until(lambda: all(list(it.requests) for it in supervisor._replicas))
            supervisor.scale(1)
            assert await asyncio.gather(*streams) == 6 * [want]
            await until(lambda: sum(task.done() for task in made.keepers) == 2)
            assert len(engines()) == 1

            supervisor.scale(2)
            await until(lambda: [it.state for it in supervisor.replicas()] == 2 * [EngineState.READY])
            cached = [await num_cached(supervisor, token) for token in 2 * (8, 9, 10)]
            assert cached == [0, 0, 0, 96, 96, 96]  # each prompt goes where it is cached
            with pytest.raises(ConfigError, match="at least one replica must stay"):
                supervisor.scale(0)
            await supervisor.shutdown(5)

    run(body)


def test_the_load_decides_how_many_replicas_there_are(config, monkeypatch):
    monkeypatch.setattr(supervisor_module, "_TARGET_S", 0.05)
    monkeypatch.setattr(replica_target, "GROW_AFTER_S", 0.0)
    monkeypatch.setattr(replica_target, "SHRINK_AFTER_S", 3.0)

    async def body():
        async with cluster(config) as made:
            supervisor = made.supervisor(1, Launcher(made), ReplicaTarget(1, 2))
            made.keep()
            await supervisor.load()
            streams = [asyncio.create_task(tokens_of(supervisor, name=f"{number}")) for number in range(8)]
            await until(lambda: len(supervisor.replicas()) == 2)
            assert len({tuple(tokens) for tokens in await asyncio.gather(*streams)}) == 1
            await until(lambda: len(supervisor.replicas()) == 1)
            await supervisor.shutdown(5)

    run(body)


def test_a_server_that_is_gone_leaves_no_engine(config, monkeypatch):
    monkeypatch.setattr(keeper, "GONE_S", 2.0)

    async def body():
        async with cluster(config) as made:
            made.keep()
            engine = await ProcessEngine.start(config, launch=made.places.launch)
            assert len(engines()) == 1
            for task in made.places._tasks:
                task.cancel()  # as of a process that was stopped
            await until(lambda: not engines())
            assert "silent for 2 s" in made.news[-2] + made.news[-1]
            await engine.shutdown(0)

    run(body)


def test_a_silent_connection_is_made_anew(config, monkeypatch):
    monkeypatch.setattr(keeper, "LOST_S", 1.0)

    async def body():
        async with cluster(config) as made:
            carriers: list[Carrier] = []

            async def forward(reader, writer) -> None:
                path = Carrier()
                carriers.append(path)
                there = await asyncio.open_connection("127.0.0.1", made.places.port)
                await asyncio.gather(path.carry(reader, there[1]), path.carry(there[0], writer))

            async with await asyncio.start_server(forward, "127.0.0.1") as proxy:
                kept = made.keep(port=proxy.sockets[0].getsockname()[1])
                (await made.places.launch(1)).kill()
                carriers[0].is_broken = True
                await until(lambda: not any(place.is_free for place in made.places._places.values()))
                (await made.places.launch(1)).kill()
                assert len(carriers) > 1
                kept.cancel()
                await asyncio.gather(kept, return_exceptions=True)

    run(body)


class Carrier:
    """Carries the bytes of a connection, until it is broken: then both ends see an open one that brings nothing."""

    is_broken = False

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.is_broken:
                writer.write(data)
        writer.close()


def test_an_engine_that_is_ended_twice_ends(config):
    async def body():
        async with cluster(config) as made:
            settings = JoinSettings(host="127.0.0.1", port=made.places.port, token=TOKEN, num_threads=1)
            kept = Keeper(settings, made.news.append)
            made.keepers.append(asyncio.create_task(kept.run()))
            engine = await ProcessEngine.start(config, launch=made.places.launch)
            ending = [asyncio.create_task(kept._end_engine())]
            for _ in range(3):  # it waits for the process meanwhile
                await asyncio.sleep(0)
            ending.append(asyncio.create_task(kept._end_engine()))
            await asyncio.gather(*ending)
            assert not engines()
            await engine.shutdown(0)

    run(body)


def test_the_end_of_an_engine_is_sent_before_an_orphan_ends(config, monkeypatch):
    monkeypatch.setattr(keeper, "LAST_WORDS_S", 2 * BEAT_S)  # the keeper shows that it is there meanwhile

    async def body():
        async with cluster(config) as made:
            events: list[str] = []

            @contextlib.contextmanager
            def computing():
                try:
                    yield
                finally:
                    events.append("may end")

            settings = JoinSettings(host="127.0.0.1", port=made.places.port, token=TOKEN, num_threads=1)
            kept = Keeper(settings, made.news.append, computing)
            say = kept._say

            def note(message, *payload) -> None:
                say(message, *payload)
                if isinstance(message, Ended):
                    events.append("sent")

            kept._say = note
            made.keepers.append(asyncio.create_task(kept.run()))
            engine = await ProcessEngine.start(config, launch=made.places.launch)
            os.kill(engines()[0].pid, signal.SIGKILL)
            await until(lambda: "may end" in events)
            await until(lambda: any(place.is_free for place in made.places._places.values()))
            assert events == ["sent", "may end"]
            await engine.shutdown(0)

    run(body)


def test_an_engine_that_is_ended_before_it_begins_leaves_its_place(config):
    async def body():
        async with cluster(config) as made:
            made.keep()
            for _ in range(2):
                (await made.places.launch(1)).kill()

    run(body)


def test_a_machine_pulls_the_model_and_packs_it_once(config, want, tmp_path, monkeypatch):
    async def body(hub):
        commit = hub.add_folder("o/m", Path(config.model_path)).commit
        there = f"/nowhere/models--o--m/snapshots/{commit}"
        theirs = dataclasses.replace(config, model_path=there, packed_file="/nowhere/m.slabs")
        async with cluster(config) as made:
            made.keep(cache_dir=tmp_path / "cache")
            for number in (1, 2):
                engine = await ProcessEngine.start(theirs, launch=made.places.launch)
                assert await tokens_of(engine) == want[:NUM_TOKENS]
                await engine.shutdown(5)
                await until(lambda: any(place.is_free for place in made.places._places.values()))
                pulls = [it for it in made.news if it.startswith("pulling o/m")]
                assert (pulls[0], pulls[-1]) == (f"pulling o/m@{commit}: 0%", f"pulling o/m@{commit}: 100%")
                assert len([it for it in made.news if "packing" in it and it.endswith(": 100%")]) == 1, number
            assert len(list((tmp_path / "cache" / "experts").glob("o--m-*.slabs"))) == 1

    with hub_of_this_process(monkeypatch, tmp_path / "hub") as hub:
        run(partial(body, hub))


def test_a_machine_without_the_model_names_itself_the_model_and_the_remedy(config, tmp_path, monkeypatch):
    theirs = dataclasses.replace(config, model_path=f"/nowhere/models--o--gone/snapshots/{'0' * 40}")

    async def body():
        async with cluster(config) as made:
            task = made.keep(cache_dir=tmp_path / "cache")
            with pytest.raises(EngineError, match=r"cannot get /nowhere/models--o--gone.*o/gone"):
                await ProcessEngine.start(theirs, launch=made.places.launch)
            with pytest.raises(HubError, match=f"^{socket.gethostname()} cannot get"):
                await task

    with hub_of_this_process(monkeypatch, tmp_path / "hub"):
        run(body)


def test_nothing_changes_after_the_end(config):
    async def body():
        async with cluster(config) as made:
            supervisor = made.supervisor(1, Launcher(made))
            await supervisor.shutdown(0)
            with pytest.raises(EngineError, match="has been shut down"):
                supervisor.scale(2)
            assert not made.keepers

    run(body)


def test_a_machine_that_cannot_be_used_is_told_why(config, tmp_path):
    async def body():
        async with cluster(config) as made:
            other = tmp_path / "other"
            write_tiny_mixtral(other, num_local_experts=6)
            for model, kind, words in (
                (str(other), ConfigError, "is not the server's checkpoint"),
                (str(tmp_path / "none"), CheckpointError, "has no such checkpoint"),
            ):
                task = made.keep(model=model)
                with pytest.raises(EngineError, match=words):
                    await ProcessEngine.start(config, launch=made.places.launch)
                with pytest.raises(kind, match=words):
                    await task
                made.places._places.clear()
            made.objection = "its processor differs"
            with pytest.raises(ConfigError, match="its processor differs"):
                await made.keep()
            stranger = made.keep(token=b"another secret of 32 characters!")
            await asyncio.sleep(1)
            assert not made.places._places
            assert not stranger.done()  # it waits for a server that knows it

    run(body)


def test_the_first_engine_starts_on_another_machine_than_one_that_cannot_have_it(config, tmp_path, caplog):
    async def body():
        async with cluster(config) as made:
            supervisor = made.supervisor(1)
            refused = made.keep(model=str(tmp_path / "none"))
            loading = asyncio.create_task(supervisor.load())
            await until(refused.done)
            made.keep()
            await loading
            assert "replica 0 does not start in one place; it waits for another" in caplog.text
            await supervisor.shutdown(5)

    run(body)


def test_a_lost_message_ends_the_engine(config):
    async def body():
        async with cluster(config) as made:
            made.keep()
            engine = await ProcessEngine.start(config, launch=made.places.launch)
            engine._host.num_sent += 1  # as if one had been sent
            with pytest.raises(EngineError, match="the engine process died"):
                await tokens_of(engine)
            await engine.shutdown(0)

    run(body)
