"""Engines in processes of their own over one folder: killed at any moment, and side by side."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing

import msgspec
import pytest

from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.kernels.cpu import extension
from moeflow.kv.disk.extent import read_extent
from moeflow.planner.resolve import resolve
from moeflow.processes.supervisor import Supervisor
from moeflow.settings.settings import Settings
from tests.engine.test_model_runner import run, tokens
from tests.packed import pack_beside
from tests.patience import PATIENCE_S
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not extension.is_available(), reason="only kernels give the same bits every time"),
]

TEXT = random.Random(5).choices(range(2, 258), k=600)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, max_position_embeddings=4000)
    pack_beside(folder)
    return folder


def config_of(model, cache, **changes) -> EngineConfig:
    wanted = {"num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32", **changes}
    return resolve(Settings(model=str(model), cache_dir=model, prompt_cache=cache, **wanted)).config


def expected(model, submission: Submission) -> list[int]:
    with closing(Engine.load(config_of(model, None))) as engine:
        return tokens(run(engine, [submission])[submission.request_id])


def test_a_killed_engines_successor_reads_what_it_has_written(model, tmp_path):
    """The interrupted stream continues, and its prompt is not recomputed."""
    long = Submission("long", TEXT, dataclasses.replace(GREEDY, max_tokens=1500), seed=0)
    config = config_of(model, tmp_path)

    async def body() -> None:
        supervisor = await Supervisor.start(config)
        found = []
        async for output in supervisor.stream(long):
            found += output.token_ids
            if len(found) >= 30 and not supervisor.stats().engine_restarts_total and any(tmp_path.glob("*.moekv")):
                os.kill(supervisor._replicas[0].engine._host.process.pid, signal.SIGKILL)
                async with asyncio.timeout(PATIENCE_S):
                    while not supervisor.stats().engine_restarts_total:
                        await asyncio.sleep(0.01)
        assert found == expected(model, long)
        stats = supervisor.stats()
        assert stats.engine_restarts_total == 1
        assert stats.prompt_cache_hit_tokens_total >= 512
        await supervisor.shutdown(5)

    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))


def test_replicas_share_a_folder(model, tmp_path):
    config = config_of(model, tmp_path)
    texts = [TEXT[start : start + 200] for start in range(0, 300, 50)]
    submissions = [Submission(str(i), text, GREEDY, seed=0) for i, text in enumerate(texts)]

    async def ask(supervisor, submission) -> list[int]:
        return [token async for output in supervisor.stream(submission) for token in output.token_ids]

    async def body() -> int:
        supervisor = await Supervisor.start(config, 2)
        found = await asyncio.gather(*(ask(supervisor, submission) for submission in submissions))
        assert found == answers
        stats = supervisor.stats()
        assert stats.prompt_cache_limit_bytes == config.prompt_cache.max_bytes
        await supervisor.shutdown(5)
        return stats.prompt_cache_hit_tokens_total

    answers = [expected(model, submission) for submission in submissions]
    assert asyncio.run(asyncio.wait_for(body(), PATIENCE_S)) == 0
    assert asyncio.run(asyncio.wait_for(body(), PATIENCE_S)) == 6 * 192


CHILD = """
import sys, itertools, random, msgspec
from moeflow.core.engine_config import EngineConfig
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.core.engine_messages import Submission
engine = Engine.load(msgspec.json.decode(sys.stdin.read(), type=EngineConfig))
print("ready", flush=True)
for number in itertools.count():
    prompt = random.Random(number % 7).choices(range(2, 258), k=600)
    engine.submit(Submission(str(number), prompt, SamplingParams(max_tokens=4, temperature=0), seed=0))
    while engine.has_work:
        engine.step()
"""


def test_writers_that_are_killed_at_any_moment_leave_only_whole_blocks(model, tmp_path):
    config = config_of(model, tmp_path, prompt_cache_bytes=1_200_000)
    rng = random.Random(1)
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            child.stdin.write(msgspec.json.encode(config))
            child.stdin.close()
            assert child.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.05, 0.6))
            child.kill()
    files = list(tmp_path.glob("*.moekv"))
    assert files
    for file in files:
        extent, content = read_extent(file), file.read_bytes()
        assert extent is not None
        for number in range(len(extent.keys)):
            start = number * extent.block_bytes
            assert extent.is_whole(number, memoryview(content)[start : start + extent.block_bytes])
    submissions = [
        Submission(str(number), random.Random(number).choices(range(2, 258), k=600), GREEDY, seed=0)
        for number in range(7)
    ]
    with closing(Engine.load(config)) as engine, closing(Engine.load(config_of(model, None))) as plain:
        for submission in submissions:
            name = submission.request_id
            assert tokens(run(engine, [submission])[name]) == tokens(run(plain, [submission])[name])
        assert engine.stats().prompt_cache_hit_tokens_total > 0
        assert engine.stats().prompt_cache_bytes <= 1_200_000
    assert not list(tmp_path.glob(".*.tmp"))
