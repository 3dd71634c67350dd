"""The engine in its own process: it loads, streams, cancels, reports failure, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil
import pytest

from moeflow.core.engine_messages import Submission
from moeflow.core.errors import ConfigError, EngineError
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.client import EngineState
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.processes import stall
from moeflow.processes.pass_record import make_descriptor
from moeflow.processes.process_client import ProcessEngine
from moeflow.processes.supervisor import Supervisor
from moeflow.settings.settings import Settings
from tests.packed import pack_beside
from tests.patience import PATIENCE_S
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.slow


LONG = 30_000  # tokens: many seconds, cancelled before


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, max_position_embeddings=2 * LONG)
    pack_beside(folder)
    settings = Settings(model=str(folder), cache_dir=folder, num_threads=1, max_num_seqs=4, max_num_batched_tokens=64)
    return resolve(settings).config


def submission(name: str, max_tokens: int = LONG) -> Submission:
    return Submission(name, [5, 6, 7], SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True), seed=0)


def run(body) -> None:
    """Run a scenario; afterwards no child of its own may be left. (multiprocessing's helper stays, once used.)"""
    before = set(children())
    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))
    assert not set(children()) - before


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_process_streams_cancels_and_shuts_down_in_order(config):
    async def body():
        progress = []
        engine = await ProcessEngine.start(config, on_progress=lambda done, total: progress.append((done, total)))
        assert progress
        assert progress[-1][0] == progress[-1][1] > 0
        assert engine.is_alive
        assert engine.model.num_experts == 4

        tokens = [t async for out in engine.stream(submission("whole", 20)) for t in out.token_ids]
        assert len(tokens) == 20

        stream = engine.stream(submission("closed"))
        assert (await anext(stream)).token_ids == tokens[:1]
        await stream.aclose()
        await until(lambda: engine.stats().requests_cancelled_total == 1)

        assert engine.stats().kv_blocks_used == engine.stats().num_running == 0

        refused = [out async for out in engine.stream(Submission("bad", [], SamplingParams(), seed=0))]
        assert "empty" in refused[0].error

        pending = asyncio.create_task(collect(engine, "running", 300))
        await asyncio.sleep(0.05)
        await engine.shutdown(deadline_s=30)
        assert (await pending)[-1].finish_reason is FinishReason.LENGTH
        assert not engine.is_alive
        with pytest.raises(EngineError):
            await anext(engine.stream(submission("late")))

    run(body)


async def collect(engine: ProcessEngine, name: str, max_tokens: int) -> list:
    return [out async for out in engine.stream(submission(name, max_tokens))]


def test_a_deadline_cuts_long_requests_short(config):
    async def body():
        engine = await ProcessEngine.start(config)
        pending = [asyncio.create_task(collect(engine, f"r{i}", LONG)) for i in range(3)]
        await until(lambda: engine.stats().num_running == 3)
        await engine.shutdown(deadline_s=0)
        for outputs in await asyncio.gather(*pending):
            assert outputs[-1].finish_reason is FinishReason.CANCELLED

    run(body)


def test_every_stream_ends_when_the_process_is_killed(config):
    async def body():
        failures = []
        engine = await ProcessEngine.start(config, on_failure=lambda: failures.append(1))
        pending = [asyncio.create_task(collect(engine, f"r{i}", LONG)) for i in range(2)]
        await until(lambda: engine.stats().num_running == 2)
        os.kill(engine._host.process.pid, signal.SIGKILL)
        for result in await asyncio.gather(*pending, return_exceptions=True):
            assert isinstance(result, EngineError)
            reason = f"process {engine._host.process.pid}: SIGKILL, not for lack of memory: another process sent it"
            assert str(result) == f"the engine process died ({reason})"
        assert not engine.is_alive
        assert len(failures) == 1
        await engine.shutdown(deadline_s=1)

    run(body)


def test_every_stream_ends_when_a_message_is_none(config):
    async def body():
        engine = await ProcessEngine.start(config)
        pending = asyncio.create_task(collect(engine, "r", LONG))
        await until(lambda: engine.stats().num_running == 1)
        engine._decoder = msgspec.msgpack.Decoder(int)
        with pytest.raises(EngineError, match="cannot be taken in"):
            await pending
        assert not engine.is_alive
        await engine.shutdown(deadline_s=1)

    run(body)


def test_statistics_come_while_a_prompt_is_computed(config):
    async def body():
        engine = await ProcessEngine.start(config)
        seen = []
        take = engine._take
        engine._take = lambda message: (take(message), seen.append(engine.stats().prompt_tokens_total))
        prompt = Submission("long", [5] * 200, SamplingParams(max_tokens=1), seed=0)
        assert len([out async for out in engine.stream(prompt)]) == 1
        assert seen == [64, 128, 192, 200]
        await engine.shutdown(deadline_s=1)

    run(body)


def test_without_a_place_for_the_socket_it_is_said_what_to_do(config, tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def body():
        with pytest.raises(ConfigError, match="TMPDIR"):
            await ProcessEngine.start(config)

    run(body)
    assert not list(folder.iterdir())


def test_a_model_that_cannot_be_loaded_is_reported(config, tmp_path):
    folder = tmp_path / "damaged"
    write_tiny_mixtral(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    async def body():
        with pytest.raises(EngineError, match=r"model\.safetensors"):
            await ProcessEngine.start(dataclasses.replace(config, model_path=str(folder)))

    run(body)


@pytest.mark.parametrize("code", [0, 1])
def test_a_process_that_ends_before_it_says_anything_is_a_failure(config, monkeypatch, tmp_path, code):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nexit {code}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))

    async def body():
        with pytest.raises(EngineError, match=rf"died \(.*exit code {code}\)"):
            await ProcessEngine.start(config)

    run(body)


def test_an_engine_whose_parent_went_before_it_said_anything_leaves(tmp_path):
    async def body():
        record = make_descriptor(4)
        arguments = (f"ipc://{tmp_path}/engine", str(os.getppid()), str(record))
        command = (sys.executable, "-m", "moeflow.processes.main", *arguments)
        engine = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, pass_fds=(record,))
        os.close(record)
        _, errors = await engine.communicate()
        assert engine.returncode == 0
        assert b"the parent process is gone" in errors

    run(body)


PARENT = """
import asyncio, os, signal, sys
import msgspec
from moeflow.core.engine_config import EngineConfig
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.engine_messages import Submission
from moeflow.processes.process_client import ProcessEngine

async def main():
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    engine = await ProcessEngine.start(config)
    sampling = SamplingParams(max_tokens=19_000, ignore_eos=True)  # half a minute at least
    async for _ in engine.stream(Submission('long', [5, 6, 7], sampling, seed=0)):
        if sys.argv[2] == "stopped":
            os.kill(engine._host.process.pid, signal.SIGSTOP)
        print(engine._host.process.pid, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("engine_is", ["busy", "stopped"])
def test_an_orphan_ends_whatever_it_does(config, tmp_path, engine_is):
    """Kill -9 of the parent: the engine must not live on with gigabytes in its hands, not even if it cannot run."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)

    async def body():
        arguments = (msgspec.json.encode(config), engine_is)
        parent = await asyncio.create_subprocess_exec(
            sys.executable, script, *arguments, stdout=asyncio.subprocess.PIPE, cwd=Path.cwd()
        )
        child_pid = int(await parent.stdout.readline())
        parent.kill()
        await parent.wait()
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: not psutil.pid_exists(child_pid) or psutil.Process(child_pid).status() == "zombie")

    run(body)


def test_without_the_kernels_help_an_orphan_ends_in_the_midst_of_a_pass(tmp_path):
    """Where there is no parent-death signal, a thread looks."""
    script = tmp_path / "child.py"
    script.write_text(
        "import os, sys, time\n"
        "from moeflow.processes import lifeline\n"
        "from moeflow.processes.pass_record import PassRecord, make_descriptor\n"
        "sys.platform = 'another'\n"
        "parent = os.getpid()\n"
        "if os.fork():\n"
        "    time.sleep(60)\n"
        "lifeline.tie_to_parent(parent, PassRecord(make_descriptor(4)))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )

    async def body():
        parent = await asyncio.create_subprocess_exec(
            sys.executable, script, stdout=asyncio.subprocess.PIPE, cwd=Path.cwd()
        )
        child_pid = int(await parent.stdout.readline())
        parent.kill()
        await parent.wait()
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: not psutil.pid_exists(child_pid) or psutil.Process(child_pid).status() == "zombie")

    run(body)


def test_a_dead_process_tells_which_pass_it_was_in(config):
    async def body():
        engine = await ProcessEngine.start(config)
        pending = [asyncio.create_task(collect(engine, f"r{i}", LONG)) for i in range(2)]
        await until(lambda: engine.stats().num_running == 2)
        passes = engine.stats().passes_total
        await until(lambda: engine.stats().passes_total > passes)
        in_pass: dict[str, int] = {}
        while not in_pass:  # it may be killed between two passes, but not for long
            os.kill(engine._host.process.pid, signal.SIGSTOP)
            in_pass = engine._host.in_pass()
            if not in_pass:
                os.kill(engine._host.process.pid, signal.SIGCONT)
        os.kill(engine._host.process.pid, signal.SIGKILL)
        await asyncio.gather(*pending, return_exceptions=True)
        assert engine.death.in_pass == in_pass
        assert in_pass.keys() == {"r0", "r1"}
        assert all(0 < num_tokens < LONG for num_tokens in in_pass.values())
        assert engine.death.is_from_outside
        await engine.shutdown(deadline_s=1)

    run(body)


def test_a_stopped_process_is_noticed_and_may_go_on(config, monkeypatch):
    monkeypatch.setattr(stall, "LOST_S", PATIENCE_S)

    async def body():
        engine = await ProcessEngine.start(config)
        stream = engine.stream(submission("r"))
        await anext(stream)
        os.kill(engine._host.process.pid, signal.SIGSTOP)
        await until(lambda: engine.state is EngineState.STALLED)
        assert engine.stats().is_engine_stalled
        os.kill(engine._host.process.pid, signal.SIGCONT)
        await until(lambda: engine.state is EngineState.READY)
        assert not engine.stats().is_engine_stalled
        assert (await anext(stream)).token_ids
        await stream.aclose()
        await engine.shutdown(deadline_s=1)

    run(body)


def test_a_process_that_stays_stopped_is_ended(config, monkeypatch):
    monkeypatch.setattr(stall, "LOST_S", 1.0)

    async def body():
        engine = await ProcessEngine.start(config)
        pending = asyncio.create_task(collect(engine, "r", LONG))
        await until(lambda: engine.stats().num_running == 1)
        os.kill(engine._host.process.pid, signal.SIGSTOP)
        with pytest.raises(
            EngineError, match=r"ended because it did not answer: process \d+ has been stopped for \d+ s"
        ):
            await pending
        assert engine.death.is_from_outside
        assert engine.death.in_pass.keys() <= {"r"}
        await engine.shutdown(deadline_s=1)

    run(body)


def test_killed_again_and_again_streams_are_those_of_an_engine_that_lives(config):
    """The supervisor over real processes, which are killed while they load, compute a prompt, and decode."""
    asked = [
        Submission("greedy", [5, 6, 7], SamplingParams(max_tokens=250, temperature=0, ignore_eos=True), seed=0),
        Submission("drawn", [8] * 150, SamplingParams(max_tokens=200, ignore_eos=True, logprobs=2), seed=4),
        Submission("job", [9, 9], SamplingParams(max_tokens=250, ignore_eos=True), seed=5, is_batch=True),
    ]

    async def read(engine, each) -> tuple[list, list, FinishReason | None]:
        outputs = [output async for output in engine.stream(each)]
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
        return [token for output in outputs for token in output.token_ids], logprobs, outputs[-1].finish_reason

    async def body():
        supervisor = await Supervisor.start(config)
        calm = await asyncio.gather(*(read(supervisor, each) for each in asked))
        reading = asyncio.gather(*(read(supervisor, each) for each in asked))
        for delay_s in (0.05, 0.01, 0.3):
            await until(lambda: supervisor.state is EngineState.READY)
            await asyncio.sleep(delay_s)
            if not reading.done():
                os.kill(supervisor._replicas[0].engine._host.process.pid, signal.SIGKILL)
                await until(lambda: supervisor.state is EngineState.RESTARTING)
        assert await reading == calm
        assert supervisor.stats().engine_restarts_total >= 2
        await supervisor.shutdown(5)

    run(body)


def in_this_process(config, asked: list[Submission]) -> list[list[int]]:
    engine = Engine.load(config)
    for each in asked:
        engine.submit(each)
    found: dict[str, list[int]] = {each.request_id: [] for each in asked}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    engine.close()
    return list(found.values())


async def reading(engine: Supervisor, asked: list[Submission]) -> list[list[int]]:
    async def read(each: Submission) -> list[int]:
        outputs = [output async for output in engine.stream(each)]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        return [token for output in outputs for token in output.token_ids]

    return await asyncio.gather(*(read(each) for each in asked))


async def reading_in_both(engine: Supervisor, asked: list[Submission]) -> asyncio.Task[list[list[int]]]:
    """Return a task that reads streams while both replicas compute; retry if a busy machine missed that moment."""
    under_way = asyncio.create_task(reading(engine, asked))
    await until(lambda: under_way.done() or all(each.stats.num_running for each in engine.replicas()))
    if not under_way.done():
        return under_way
    await under_way
    return await reading_in_both(engine, asked)


def test_streams_of_a_replica_that_is_killed_or_stopped_go_on_in_the_other(config, monkeypatch):
    """A restarted or continued replica gets work again."""
    monkeypatch.setattr(stall, "LOST_S", PATIENCE_S)
    sampling = SamplingParams(max_tokens=800, ignore_eos=True)
    asked = [Submission(f"r{number}", [5, number], sampling, seed=number) for number in range(12)]
    calm = in_this_process(config, asked)

    async def body():
        both = await Supervisor.start(config, 2)
        assert both.model.max_num_seqs == 8
        pids = [replica.engine._host.process.pid for replica in both._replicas]
        under_way = await reading_in_both(both, asked)
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: both.replicas()[0].state is EngineState.RESTARTING)
        assert both.state is EngineState.READY
        assert await under_way == calm

        await until(lambda: both.replicas()[0].state is EngineState.READY)
        under_way = await reading_in_both(both, asked)
        os.kill(pids[1], signal.SIGSTOP)
        await until(lambda: both.replicas()[1].state is EngineState.STALLED)
        assert await under_way == calm
        os.kill(pids[1], signal.SIGCONT)
        await until(lambda: both.replicas()[1].state is EngineState.READY)
        assert await reading(both, asked) == calm
        assert [each.stats.engine_restarts_total for each in both.replicas()] == [1, 0]
        await until(lambda: not both.stats().num_running)
        assert both.replicas()[1].stats.requests_cancelled_total
        await both.shutdown(5)

    run(body)
