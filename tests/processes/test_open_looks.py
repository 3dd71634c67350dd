"""Questions to an engine end with an answer, with its end, or in time."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from moeflow.core.engine_messages import Seen
from moeflow.core.observation import Question, Sight, Watch, Watching
from moeflow.processes import open_looks
from moeflow.processes.open_looks import OpenLooks


def seen(number: int, sight: Sight) -> Seen:
    return Seen(number, msgspec.msgpack.encode(sight))


def asking(looks: OpenLooks) -> asyncio.Task[Sight | None]:
    return asyncio.create_task(looks.ask(Watch()))


def test_each_question_gets_its_own_answer():
    async def body():
        sent = []
        looks = OpenLooks(sent.append)
        first, second = asking(looks), asking(looks)
        await asyncio.sleep(0)
        assert [msgspec.msgpack.decode(look.question, type=Question) for look in sent] == [Watch(), Watch()]
        looks.take(seen(sent[1].number, Watching(2.0)))
        looks.take(seen(sent[0].number, Watching(1.0)))
        assert await first == Watching(1.0)
        assert await second == Watching(2.0)

    asyncio.run(body())


def test_the_end_of_the_engine_ends_open_questions():
    async def body():
        looks = OpenLooks(lambda look: None)
        open_look = asking(looks)
        await asyncio.sleep(0)
        looks.end()
        assert await open_look is None

    asyncio.run(asyncio.wait_for(body(), open_looks.ANSWER_S / 2))


def test_a_question_without_an_answer_ends_in_time(monkeypatch):
    monkeypatch.setattr(open_looks, "ANSWER_S", 0.01)

    async def body():
        sent = []
        looks = OpenLooks(sent.append)
        assert await looks.ask(Watch()) is None
        looks.take(seen(sent[0].number, Watching(1.0)))  # too late
        assert looks._waiting == {}

    asyncio.run(body())


def test_an_error_is_logged_and_is_no_answer(caplog):
    async def body():
        looks = OpenLooks(lambda look: None)
        open_look = asking(looks)
        await asyncio.sleep(0)
        looks.take(Seen(0, error="KeyError: 'x'"))
        assert await open_look is None

    asyncio.run(body())
    assert "KeyError" in caplog.text


def test_an_answer_of_an_unknown_kind_is_an_error():
    async def body():
        looks = OpenLooks(lambda look: None)
        open_look = asking(looks)
        await asyncio.sleep(0)
        looks.take(Seen(0, msgspec.msgpack.encode({"type": "unknown"})))
        with pytest.raises(msgspec.ValidationError):
            await open_look

    asyncio.run(body())
