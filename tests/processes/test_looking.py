"""Questions about passes, through an engine's process and several: answers between passes, and no hang at a death."""

from __future__ import annotations

import asyncio

import pytest

from moeflow.core.observation import Watch, Watching
from moeflow.engine.client import EngineState
from moeflow.processes.process_client import ProcessEngine
from moeflow.processes.supervisor import Supervisor
from tests.processes.test_process import LONG, config, run, submission, until

__all__ = ["config"]
pytestmark = pytest.mark.slow


def test_an_engine_answers_when_it_is_idle_and_when_it_is_busy(config):
    async def body():
        engine = await ProcessEngine.start(config)
        try:
            idle = await engine.look(Watch())
            assert isinstance(idle[0], Watching)
            stream = engine.stream(submission("long", LONG))
            await anext(stream)
            busy = await engine.look(Watch())
            assert busy[0].observed_s > idle[0].observed_s
            await stream.aclose()
        finally:
            await engine.shutdown(0)
        assert await engine.look(Watch()) == {}

    run(body)


def test_a_question_ends_with_the_engine(config):
    async def body():
        engine = await ProcessEngine.start(config)
        try:
            psutil_process = engine._host.process
            psutil_process.send_signal(19)  # SIGSTOP: the question arrives, and no answer comes
            looking = asyncio.create_task(engine.look(Watch()))
            await asyncio.sleep(0)
            psutil_process.kill()
            started_s = asyncio.get_running_loop().time()
            assert await looking == {}
            assert asyncio.get_running_loop().time() - started_s < 1.5  # not because the time was over
        finally:
            await engine.shutdown(0)

    run(body)


def test_replicas_answer_by_their_places_and_dead_ones_are_left_out(config):
    async def body():
        supervisor = await Supervisor.start(config, 2)
        try:
            assert set(await supervisor.look(Watch())) == {0, 1}
            supervisor._replicas[0].engine._host.kill()
            await until(lambda: supervisor.replicas()[0].state is EngineState.RESTARTING)
            assert set(await supervisor.look(Watch())) == {1}
            await until(lambda: supervisor.replicas()[0].state is EngineState.READY)
            assert set(await supervisor.look(Watch())) == {0, 1}
        finally:
            await supervisor.shutdown(0)

    run(body)
