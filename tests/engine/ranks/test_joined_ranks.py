"""Ranks of machines that join answer like one process, also if some are killed."""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest

from moeflow.cli.chaos.deployment import free_port
from moeflow.core.engine_messages import Submission
from moeflow.core.errors import ConfigError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.client import EngineState
from moeflow.engine.engine import Engine
from moeflow.kernels.cpu import extension
from moeflow.parallel.tcp.cluster_token import default_token_file, ensure_token
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.processes.supervisor import Supervisor
from moeflow.settings.settings import Settings
from tests.engine.ranks.joiners import PATIENCE_S, Joiner, joined
from tests.processes.test_process import in_this_process
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not extension.is_available(), reason=extension.why_not()),
]
LONG = [(7 * index) % 250 + 2 for index in range(400)]  # tokens whose results travel in both ways
PROMPTS = [[5, 9, 200, 31, 7], LONG, [100]]
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(
        folder, hidden_size=128, num_local_experts=5, num_hidden_layers=3, max_position_embeddings=1024
    )  # no rank has half of them
    return str(folder)


@pytest.fixture
def cache_dir(tmp_path):
    ensure_token(default_token_file(tmp_path))
    return tmp_path


def plan_of(model, cache_dir, port=None, num_ranks=2, **settings):
    more = {} if port is None else {"listen_ranks": str(port), "num_ranks": num_ranks}
    settings = {"kv_cache_bytes": 2**22, "num_threads": 1, "cache_dir": cache_dir, "is_served": True} | settings
    return resolve(Settings(model=model, **settings, **more)).plan


def asked(prompts) -> list[Submission]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return [Submission(str(number), prompt, sampling, seed=number) for number, prompt in enumerate(prompts)]


async def read(engine, each):
    return [token async for output in engine.stream(each) for token in output.token_ids]


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def rank_of(joiner: Joiner) -> psutil.Process:
    """Return the process of a rank, whose keeper `moeflow join` is."""
    (rank,) = psutil.Process(joiner.process.pid).children()
    return rank


def test_tokens_are_those_of_one_process_through_kills(model, cache_dir):
    """Machines wait for the next server. A killed rank, keeper or engine interrupts streams, and ends none."""
    port = free_port()

    async def serve(plan, disturbances):
        supervisor = await Supervisor.start(plan.config, nodes=plan.node_replicas)
        reading = asyncio.gather(*(read(supervisor, each) for each in asked(PROMPTS)))
        for disturb in disturbances:
            await until(lambda: supervisor.stats().num_running > 0)
            disturb()
            await until(lambda: supervisor.state is not EngineState.READY)
            await until(lambda: supervisor.state is EngineState.READY)
        assert not disturbances or not reading.done()
        found = await reading
        assert supervisor.stats().engine_restarts_total == len(disturbances)
        await supervisor.shutdown(5)
        return found

    def replace(joiner: Joiner) -> None:
        joiner.end()
        joiners[joiners.index(joiner)] = Joiner(f"127.0.0.1:{port}", cache_dir)

    def kill_engine() -> None:
        engines = [it for it in psutil.Process().children() if "moeflow.processes.main" in it.cmdline()]
        engines[0].kill()

    with joined(f"127.0.0.1:{port}", cache_dir, number=2) as joiners:
        for settings, disturbances in (
            ({}, (lambda: rank_of(joiners[0]).kill(), lambda: replace(joiners[1]), kill_engine)),
            ({"quantize": "int8", "stages": "3"}, ()),
        ):
            alone = plan_of(model, cache_dir, **{key: it for key, it in settings.items() if key != "stages"})
            want = in_this_process(alone.config, asked(PROMPTS))
            plan = plan_of(model, cache_dir, port, num_ranks=3, **settings)
            assert asyncio.run(serve(plan, disturbances)) == want
        for joiner, number in zip(joiners, (signal.SIGINT, signal.SIGTERM), strict=True):
            joiner.process.send_signal(number)
            assert joiner.process.wait(PATIENCE_S) == 0
            assert "this machine has left" in joiner.said()
            assert "Traceback" not in joiner.said()


def test_a_machine_that_cannot_load_leaves_and_another_is_awaited(model, cache_dir, tmp_path, caplog):
    port = free_port()
    there = tmp_path / "there"
    file = pack(model, None, cache_dir=there).path
    file.write_bytes(bytes(file.stat().st_size))
    token_file = default_token_file(there)
    default_token_file(cache_dir).rename(token_file)
    plan = plan_of(model, cache_dir, port, cluster_token_file=token_file)

    async def body():
        starting = asyncio.create_task(Supervisor.start(plan.config, nodes=plan.node_replicas))
        await until(lambda: joiner.process.poll() is not None and "waits for another" in caplog.text)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

    with joined(f"127.0.0.1:{port}", there) as (joiner,):
        asyncio.run(body())
        assert joiner.process.returncode == 2
        assert f"file {file}" in joiner.said()


def test_ranks_of_other_machines_need_a_server(model, cache_dir):
    with pytest.raises(ConfigError, match="are for `moeflow serve` and `moeflow batch`"):
        Engine.load(plan_of(model, cache_dir, free_port()).config)
