from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from moeflow.core.engine_messages import EngineStats
from moeflow.core.errors import EngineError
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.engine.generator import Generator
from moeflow.server.config import ServerConfig
from moeflow.server.jobs.journal import ResultJournal
from moeflow.server.jobs.lines import scan
from moeflow.server.jobs.runner import WINDOW, run_job
from moeflow.server.service import Service
from tests.server.fake_client import NAME, REPLY
from tests.server.jobs.requests import chat_line, completion_line, read_lines, response_line, write_lines
from tests.tiny_mixtral import EOS

pytestmark = pytest.mark.anyio
LIMIT = 100_000


@pytest.fixture
def service(engine, tokenizer) -> Service:
    service = Service(ServerConfig())
    service.attach(Generator(engine, tokenizer))
    return service


async def run(service: Service, folder: Path, *lines: bytes, timeout_s: float = 10.0) -> ResultJournal:
    source = write_lines(folder / "in.jsonl", *lines)
    ids = scan(source, max_line_bytes=LIMIT).result_ids
    with ResultJournal(folder / "out.jsonl", folder / "err.jsonl", ids, NAME) as journal:
        async with asyncio.timeout(timeout_s):
            await run_job(service, source, journal, LIMIT)
    return journal


async def test_answers_are_what_the_endpoints_would_say(service, engine, tmp_path):
    journal = await run(service, tmp_path, chat_line("a", n=2), completion_line("b", max_tokens=3), chat_line("c"))
    answers = {line["custom_id"]: line["response"]["body"] for line in read_lines(tmp_path / "out.jsonl")}
    assert [choice["message"]["content"] for choice in answers["a"]["choices"]] == [REPLY, REPLY]
    assert answers["b"]["object"] == "text_completion"
    assert answers["b"]["usage"]["completion_tokens"] == 3
    assert journal.totals.completed == 3
    assert all(submission.is_batch for submission in engine.submissions)


async def test_responses_are_answered_and_counted(service, engine, tmp_path):
    engine.num_cached_tokens = 3
    journal = await run(service, tmp_path, response_line("a"), response_line("b", inptu="x"), chat_line("c"))
    answers = {line["custom_id"]: line["response"]["body"] for line in read_lines(tmp_path / "out.jsonl")}
    assert answers["a"]["output"][0]["content"][0]["text"] == REPLY
    (error,) = read_lines(tmp_path / "err.jsonl")
    assert "did you mean 'input'" in error["response"]["body"]["error"]["message"]
    usage = answers["a"]["usage"]
    totals = journal.totals
    assert totals.completion_tokens == 2 * usage["output_tokens"] > 0
    assert totals.prompt_tokens == usage["input_tokens"] + answers["c"]["usage"]["prompt_tokens"]
    assert totals.cached_tokens == 6


async def test_each_line_has_its_story(service, engine, tmp_path):
    engine.fail_after = 3
    await run(service, tmp_path, completion_line("a", max_tokens=3), completion_line("b", max_tokens=4))
    (answer,), (error,) = (read_lines(tmp_path / name) for name in ("out.jsonl", "err.jsonl"))
    ids = [line["response"]["request_id"] for line in (answer, error)]
    told = await service.stories.all()
    done, failed = (next(story for story in told if story.is_named(it)) for it in ids)
    assert (done.state, done.is_batch, done.endpoint) == ("done", True, "/v1/completions")
    assert done.completion_tokens == answer["response"]["body"]["usage"]["completion_tokens"] == 3
    assert (failed.state, failed.error) == ("failed", "out of memory")
    assert service.stories.running() == []


async def test_a_wrong_request_is_an_error_of_its_line(service, tmp_path):
    lines = (
        chat_line("good"),
        chat_line("typo", max_tokns=3),
        chat_line("long", "x" * 1000),
        chat_line("stream", stream=True),
        chat_line("other", model="gpt-4o"),
        chat_line("greedy", n=128),
    )
    journal = await run(service, tmp_path, *lines)
    errors = {line["custom_id"]: line["response"] for line in read_lines(tmp_path / "err.jsonl")}
    assert {name: response["status_code"] for name, response in errors.items()} == {
        "typo": 400,
        "long": 400,
        "stream": 400,
        "other": 404,
        "greedy": 400,
    }
    assert "did you mean 'max_tokens'" in errors["typo"]["body"]["error"]["message"]
    assert errors["long"]["body"]["error"]["code"] == "context_length_exceeded"
    assert (journal.totals.completed, journal.totals.failed) == (1, 5)


async def test_unknown_fields_of_lines_follow_the_servers_option(service, tmp_path):
    service.config = replace(service.config, unknown_fields="ignore")
    journal = await run(service, tmp_path, chat_line("typo", max_tokns=3))
    assert (journal.totals.completed, journal.totals.failed) == (1, 0)


async def test_what_is_done_is_not_done_again(service, engine, tmp_path):
    await run(service, tmp_path, chat_line("a"), chat_line("bad", top_p=7))
    num_before = len(engine.submissions)
    await run(service, tmp_path, chat_line("a"), chat_line("bad", top_p=7), chat_line("b"))
    assert len(engine.submissions) == num_before + 1
    assert [line["custom_id"] for line in read_lines(tmp_path / "out.jsonl")] == ["a", "b"]


async def test_only_a_window_of_the_input_is_in_the_engine(service, engine, tmp_path):
    engine.pause_after = 1
    job = asyncio.create_task(run(service, tmp_path, *(chat_line(str(i)) for i in range(100))))
    for _ in range(60):  # and some more on a busy machine
        await asyncio.sleep(0.002 if len(engine.live) >= WINDOW * engine.model.max_num_seqs else 0.05)
    assert len(engine.live) == WINDOW * engine.model.max_num_seqs
    assert service.models.num_unfinished == 0  # the job stands in no queue
    engine.pause_after = None
    assert (await job).totals.completed == 100


async def test_the_window_follows_the_replicas_that_are_ready(service, engine, tmp_path):
    engine.model = msgspec.structs.replace(engine.model, max_num_seqs=6)
    known = (EngineState.READY, EngineState.RESTARTING, EngineState.DRAINING)
    ready, starting, leaving = (ReplicaStatus(state, EngineStats()) for state in known)
    engine.replica_statuses = [ready, starting, starting, leaving]
    engine.pause_after = 1
    job = asyncio.create_task(run(service, tmp_path, *(chat_line(str(i)) for i in range(40))))

    async def open_requests(number: int) -> None:
        while len(engine.live) < number:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert len(engine.live) == number

    await open_requests(WINDOW * 2)
    engine.replica_statuses = [ready, starting, ready]  # no request has ended meanwhile
    await open_requests(WINDOW * 4)
    engine.replica_statuses = [starting] * 3
    engine.pause_after = None
    assert (await job).totals.completed == 40


async def test_cancelled_it_leaves_nothing_running_and_goes_on_later(service, engine, tmp_path):
    engine.pause_after = 2
    lines = [chat_line(str(i)) for i in range(10)]
    job = asyncio.create_task(run(service, tmp_path, *lines))
    while len(engine.live) < 10:
        await asyncio.sleep(0.002)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert not engine.live
    engine.pause_after = None
    assert (await run(service, tmp_path, *lines)).totals.completed == 10


async def test_a_failed_pass_is_tried_once_more(service, engine, tmp_path):
    engine.fail_after = 2
    await run(service, tmp_path, chat_line("a"))
    assert len(engine.submissions) == 2
    (error,) = read_lines(tmp_path / "err.jsonl")
    assert error["response"]["status_code"] == 500
    assert "out of memory" in error["response"]["body"]["error"]["message"]


async def test_a_dead_engine_is_nobodys_result(service, engine, tmp_path):
    engine.pause_after = 2
    job = asyncio.create_task(run(service, tmp_path, *(chat_line(str(i)) for i in range(5))))
    while len(engine.live) < 5:
        await asyncio.sleep(0.002)
    engine.die()
    with pytest.raises(EngineError, match="died"):
        await job
    assert read_lines(tmp_path / "out.jsonl") == read_lines(tmp_path / "err.jsonl") == []


async def test_tools_are_called_in_batches_too(service, engine, tokenizer, tmp_path):
    text = '<tool_call>{"name": "look", "arguments": {"q": "x"}}</tool_call>'
    engine.reply = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    engine.model = msgspec.structs.replace(engine.model, max_model_len=4096)
    tools = [{"type": "function", "function": {"name": "look"}}]
    await run(service, tmp_path, chat_line("a", tools=tools))
    (line,) = read_lines(tmp_path / "out.jsonl")
    (choice,) = line["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"q": "x"}'}
