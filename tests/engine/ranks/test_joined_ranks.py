"""Ranks that join over TCP answer like one process. Killed, stopped or unreachable ones are noticed and return."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time

import psutil
import pytest

from moeflow.cli.chaos.deployment import free_port
from moeflow.cli.chaos.proxy import Proxy
from moeflow.core.engine_messages import Submission
from moeflow.core.errors import GroupError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.client import EngineState
from moeflow.engine.engine import Engine
from moeflow.kernels.cpu import extension
from moeflow.parallel.tcp.cluster_token import default_token_file, ensure_token
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.processes.supervisor import Supervisor
from moeflow.settings.settings import Settings
from tests.engine.ranks.joiners import Joiner, joined
from tests.engine.streamed_runs import run
from tests.processes.test_process import in_this_process
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not extension.is_available(), reason=extension.why_not()),
]
LONG = [(7 * index) % 250 + 2 for index in range(400)]  # tokens whose results travel in both ways
PROMPTS = [[5, 9, 200, 31, 7], LONG, [100]]
AT_ONCE_S = 30.0  # on a busy machine, and long before the deadline of a collective


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, hidden_size=128, num_local_experts=5, num_hidden_layers=3)  # no rank has half of them
    return str(folder)


@pytest.fixture
def cache_dir(tmp_path):
    ensure_token(default_token_file(tmp_path))
    return tmp_path


def config_of(model, cache_dir, port=None, num_ranks=2, timeout_s=60.0, **settings):
    more = {} if port is None else {"listen_ranks": str(port), "num_ranks": num_ranks}
    settings = Settings(model=model, kv_cache_bytes=2**22, num_threads=1, cache_dir=cache_dir, **more, **settings)
    config = resolve(settings).config
    if port is None:
        return config
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, timeout_s=timeout_s))


def submit(engine):
    engine.submit(Submission("a", PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True), seed=1))
    assert engine.step()


def step_often(engine):
    for _ in range(150):
        engine.step()


def test_tokens_are_those_of_one_process_and_ranks_wait_for_the_next_engine(model, cache_dir):
    port = free_port()
    with joined(f"127.0.0.1:{port}", cache_dir, number=2) as joiners:
        for number, (formats, layout) in enumerate((({}, {}), ({"quantize": "int8"}, {"stages": "3"})), 1):
            want = run(config_of(model, cache_dir, **formats), PROMPTS)
            assert run(config_of(model, cache_dir, port, num_ranks=3, **formats, **layout), PROMPTS) == want
            for joiner in joiners:
                joiner.expect("ready", times=number)
                joiner.expect("the first rank has ended; waiting to join again", times=number)
        for joiner, number in zip(joiners, (signal.SIGINT, signal.SIGTERM), strict=True):
            joiner.process.send_signal(number)
            assert joiner.process.wait(AT_ONCE_S) == 0
            assert joiner.said().endswith("this machine has left\n")
        assert "Traceback" not in joiners[0].said() + joiners[1].said()


def test_a_rank_that_is_killed_or_stopped_ends_the_engine_with_an_error_that_names_it(model, cache_dir):
    """Heartbeats notice it, long before a collective is late."""
    port = free_port()
    config = config_of(model, cache_dir, port)
    with joined(f"127.0.0.1:{port}", cache_dir) as (joiner,):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            engine = Engine.load(config)
            try:
                submit(engine)
                start_s = time.monotonic()
                os.kill(joiner.process.pid, number)
                with pytest.raises(GroupError, match=r"rank 1 \(127.0.0.1:\d+\) is gone: its process has") as caught:
                    step_often(engine)
                assert time.monotonic() - start_s < AT_ONCE_S
                assert caught.value.is_from_outside
            finally:
                engine.close()
            os.kill(joiner.process.pid, signal.SIGCONT)  # then it joins again


def test_a_stopped_rank_of_an_idle_engine_is_seen_by_the_supervisor(model, cache_dir):
    """What `/health` shows is its state."""
    port = free_port()

    async def stop_and_continue() -> None:
        supervisor = await Supervisor.start(config_of(model, cache_dir, port))
        os.kill(joiner.process.pid, signal.SIGSTOP)
        await until(lambda: supervisor.state is EngineState.RESTARTING)
        death = supervisor._replicas[0].engine.death
        assert (death.is_from_outside, "rank 1 (127.0.0.1:" in death.reason) == (True, True)
        os.kill(joiner.process.pid, signal.SIGCONT)
        await until(lambda: supervisor.state is EngineState.READY)
        await supervisor.shutdown(5)

    with joined(f"127.0.0.1:{port}", cache_dir) as (joiner,):
        asyncio.run(stop_and_continue())


def test_an_engine_without_work_notices_that_a_rank_leaves(model, cache_dir):
    port = free_port()
    with joined(f"127.0.0.1:{port}", cache_dir) as (joiner,):
        engine = Engine.load(config_of(model, cache_dir, port))
        try:
            assert engine.step() == []
            joiner.process.send_signal(signal.SIGINT)
            assert joiner.process.wait(AT_ONCE_S) == 0
            with pytest.raises(GroupError, match=r"rank 1 \(127.0.0.1:\d+\) .*has left") as caught:
                engine.step()
            assert caught.value.is_from_outside
        finally:
            engine.close()


def test_a_cut_link_ends_the_engine_and_a_mended_one_brings_the_rank_back(model, cache_dir):
    port = free_port()
    want = run(config_of(model, cache_dir), PROMPTS)
    config = config_of(model, cache_dir, port, timeout_s=3.0)
    proxy = Proxy(port)
    try:
        with joined(f"127.0.0.1:{proxy.port}", cache_dir) as (joiner,):
            engine = Engine.load(config)
            try:
                submit(engine)
                proxy.cut()
                with pytest.raises(GroupError, match=r"did not come to it within 3 s: .* the network between is cut"):
                    step_often(engine)
            finally:
                engine.close()
            proxy.mend()
            joiner.expect("waiting to join again")
            assert run(config, PROMPTS) == want
    finally:
        proxy.close()


def test_a_rank_that_cannot_load_ends_the_start_with_its_reason(model, cache_dir, tmp_path):
    port = free_port()
    there = tmp_path / "there"
    file = pack(model, None, cache_dir=there).path
    file.write_bytes(bytes(file.stat().st_size))
    default_token_file(cache_dir).rename(default_token_file(there))
    token_file = default_token_file(there)
    with joined(f"127.0.0.1:{port}", there) as (joiner,):
        config = config_of(model, cache_dir, port, cluster_token_file=token_file)
        with pytest.raises(GroupError, match=rf"rank 1 \(127.0.0.1:\d+\) ended the group: file {file}"):
            Engine.load(config)
        assert joiner.process.wait(AT_ONCE_S) == 2
        assert f"error: file {file}" in joiner.said()


async def until(condition):
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.01)


def test_streams_survive_a_killed_rank_and_a_killed_engine(model, cache_dir):
    """The rank's user starts it again, the supervisor the engine: streams go on with the tokens of one process."""
    port = free_port()
    asked = [
        Submission("greedy", [5, 6, 7], SamplingParams(max_tokens=150, temperature=0, ignore_eos=True), seed=0),
        Submission("drawn", [8] * 100, SamplingParams(max_tokens=150, ignore_eos=True), seed=4),
    ]

    async def read(engine, each):
        return [token async for output in engine.stream(each) for token in output.token_ids]

    async def answers():
        supervisor = await Supervisor.start(config_of(model, cache_dir, port))
        reading = asyncio.gather(*(read(supervisor, each) for each in asked))
        await kill_both(supervisor, reading)
        found, restarts = await reading, supervisor.stats().engine_restarts_total
        await supervisor.shutdown(5)
        return found, restarts

    async def kill_both(supervisor, reading):
        await until(lambda: supervisor.stats().num_running > 0)
        joiners[0].process.kill()
        joiners[0].process.wait()
        await until(lambda: supervisor.state is EngineState.RESTARTING)
        death = supervisor._replicas[0].engine.death
        assert (death.is_from_outside, "rank 1 (127.0.0.1:" in death.reason) == (True, True)
        joiners.append(Joiner(f"127.0.0.1:{port}", cache_dir))
        await until(lambda: supervisor.state is EngineState.READY)
        assert not reading.done()
        engine, *_ = (it for it in psutil.Process().children() if "moeflow.processes.main" in it.cmdline())
        engine.kill()
        await until(lambda: supervisor.state is EngineState.RESTARTING)

    want = in_this_process(config_of(model, cache_dir), asked)
    with joined(f"127.0.0.1:{port}", cache_dir) as joiners:
        found, restarts = asyncio.run(answers())
        assert found == want
        assert restarts == 2
        joiners[1].expect("ready", times=2)
        joiners[1].end()
