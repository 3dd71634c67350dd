"""Each client has one turn at a time, and only so much of its work may wait."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from moeflow.core.errors import QueueFullError
from moeflow.engine.fair_turns import FairTurns


class Run:
    """Turns under way, each until it may end."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns, self.begun, self.may_end = turns, [], {}
        self._tasks: list[asyncio.Task] = []

    async def ask(self, client, name) -> asyncio.Task:
        self.may_end[name] = asyncio.Event()
        task = asyncio.create_task(self._turn(client, name))
        self._tasks.append(task)
        await settle()
        return task

    async def _turn(self, client, name) -> None:
        async with self.turns.turn(client, name):
            self.begun.append(name)
            await self.may_end[name].wait()

    async def end(self, *names) -> None:
        for name in names:
            self.may_end[name].set()
            await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_client_with_much_work_waits_for_its_own():
    async def check():
        run = Run(FairTurns(2))
        for name in ("a1", "a2", "a3"):
            await run.ask("a", name)
        await run.ask("b", "b1")
        assert run.begun == ["a1", "b1"]
        await run.ask("c", "c1")
        await run.end("a1")
        assert run.begun == ["a1", "b1", "c1"]
        await run.end("b1", "c1", "a2", "a3")
        assert run.begun == ["a1", "b1", "c1", "a2", "a3"]
        assert run.turns._clients == {}

    asyncio.run(check())


def test_what_waits_is_bounded_for_each_client_apart():
    async def check():
        run = Run(FairTurns(1, max_waiting=2))
        tasks = [await run.ask("a", name) for name in ("a1", "a2", "a3", "a4")]
        with pytest.raises(QueueFullError, match="2 forms") as caught:
            await tasks[3]
        assert caught.value.retry_after_s > 0
        with pytest.raises(QueueFullError):
            run.turns.require_room("a")
        run.turns.require_room("b")
        again, other = await run.ask("a", "a2"), await run.ask("b", "b1")
        await run.end("a1", "a2", "a3", "b1")
        await asyncio.gather(*tasks[:3], again, other)
        run.turns.require_room("a")

    asyncio.run(check())


def test_the_servers_own_work_is_never_refused():
    async def check():
        turns = FairTurns(1, max_waiting=0)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(turns.turn(None, 1))
            waiting = [asyncio.create_task(stack.enter_async_context(turns.turn(None, i))) for i in range(2, 9)]
            await settle()
            turns.require_room(None)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        assert turns._clients == {}

    asyncio.run(check())


def test_who_gives_up_takes_no_turn():
    async def check():
        run = Run(FairTurns(1))
        tasks = [await run.ask("a", "a1"), await run.ask("a", "a2"), await run.ask("a", "a3")]
        tasks[1].cancel()
        await run.end("a1")
        assert run.begun == ["a1", "a3"]
        await run.end("a3")

    asyncio.run(check())
