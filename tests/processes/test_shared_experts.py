"""Replicas in processes of their own that share experts: a killed or stopped one only delays the others."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.client import EngineState
from moeflow.kernels.cpu import extension
from moeflow.planner.resolve import resolve
from moeflow.processes.supervisor import Supervisor
from moeflow.settings.settings import Settings
from tests.packed import pack_beside
from tests.processes.test_process import run, until
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())]
ASKED = [
    Submission(
        f"r{number}", [5, number], SamplingParams(max_tokens=120, temperature=number % 2, ignore_eos=True), seed=number
    )
    for number in range(8)
]


async def reading(supervisor: Supervisor) -> list[list[int]]:
    async def read(each: Submission) -> list[int]:
        return [token async for output in supervisor.stream(each) for token in output.token_ids]

    return list(await asyncio.gather(*map(read, ASKED)))


def test_streams_go_on_with_the_same_tokens_when_who_has_experts_is_killed_or_stopped(tmp_path):
    write_tiny_mixtral(tmp_path / "model", num_hidden_layers=4)
    pack_beside(tmp_path / "model", tmp_path)
    asked = {"model": str(tmp_path / "model"), "num_threads": 2, "max_num_seqs": 4, "cache_dir": tmp_path}
    shared = resolve(Settings(**asked, num_replicas=2, expert_parallel=True, is_served=True)).config
    plain = resolve(Settings(**asked, is_served=True)).config

    async def body():
        alone = await Supervisor.start(plain)
        expected = await reading(alone)
        await alone.shutdown(1)

        both = await Supervisor.start(shared, 2)
        folder = both._folder.path
        pids = [replica.engine._host.process.pid for replica in both._replicas]
        while not all(each.stats.peer_pairs_served_total for each in both.replicas()):
            assert await reading(both) == expected

        under_way = asyncio.create_task(reading(both))
        await until(lambda: all(each.stats.num_running for each in both.replicas()))
        os.kill(pids[0], signal.SIGKILL)
        assert await under_way == expected
        assert both.replicas()[1].stats.peer_pairs_taken_over_total

        await until(lambda: both.replicas()[0].state is EngineState.READY)
        served = both.replicas()[0].stats.peer_pairs_served_total
        while both.replicas()[0].stats.peer_pairs_served_total == served:  # it has its experts back
            assert await reading(both) == expected

        under_way = asyncio.create_task(reading(both))
        await until(lambda: all(each.stats.num_running for each in both.replicas()))
        before = both.replicas()[0].stats.peer_pairs_taken_over_total
        os.kill(pids[1], signal.SIGSTOP)
        await until(lambda: both.replicas()[0].stats.peer_pairs_taken_over_total > before)
        os.kill(pids[1], signal.SIGCONT)
        assert await under_way == expected
        await both.shutdown(5)
        assert not folder.exists()

    run(body)
