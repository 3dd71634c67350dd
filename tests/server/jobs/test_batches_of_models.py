"""Batch jobs of a server with several models: each job is for one, which is loaded for it as for any request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from moeflow.server.jobs.data_folder import Jobs
from tests.patience import PATIENCE_S
from tests.server.conftest import connect
from tests.server.fake_client import REPLY
from tests.server.fleet import Fleet, make_fleet
from tests.server.jobs.requests import CHAT, chat_line

pytestmark = pytest.mark.anyio


@pytest.fixture
async def fleet(tokenizer, tmp_path):
    fleet = make_fleet(tokenizer)
    jobs = fleet.app.state.jobs = Jobs(tmp_path / "data", fleet.app.state.service)
    yield fleet
    await jobs.close()


@pytest.fixture
async def http(fleet: Fleet):
    async with connect(fleet.app) as http:
        yield http


async def begin(http: httpx.AsyncClient, *lines: bytes) -> httpx.Response:
    form = {"purpose": (None, "batch"), "file": ("in.jsonl", b"\n".join(lines))}
    file = (await http.post("/v1/files", files=form)).json()
    job = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    return await http.post("/v1/batches", json=job)


async def finished(http: httpx.AsyncClient, begun: httpx.Response) -> dict:
    assert begun.status_code == 200, begun.text
    async with asyncio.timeout(PATIENCE_S):
        while True:
            batch = (await http.get(f"/v1/batches/{begun.json()['id']}")).json()
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.01)


async def results(http: httpx.AsyncClient, file_id: str) -> dict[str, dict]:
    lines = (await http.get(f"/v1/files/{file_id}/content")).text.splitlines()
    return {result["custom_id"]: result["response"] for result in map(json.loads, lines)}


async def test_each_job_is_answered_by_the_model_that_it_names(http, fleet):
    begun = [await begin(http, chat_line("1", model=name), chat_line("2", model=name)) for name in ("b", "a", "c")]
    begun.append(await begin(http, chat_line("1"), chat_line("2")))  # names none: the first, which is a
    for job, model in zip(begun, ("b", "a", "c", "a"), strict=True):
        batch = await finished(http, job)
        assert (batch["model"], batch["request_counts"]) == (model, {"total": 2, "completed": 2, "failed": 0})
        answers = await results(http, batch["output_file_id"])
        assert {answer["body"]["model"] for answer in answers.values()} == {model}
        assert {answer["body"]["choices"][0]["message"]["content"] for answer in answers.values()} == {REPLY}
    assert fleet.history == ["+b", "-b", "+a", "+c"]  # a and c fit in memory at once


async def test_requests_for_another_model_than_the_first_ones_are_errors_of_their_lines(http, fleet):
    lines = (chat_line("1", model="b"), chat_line("2"), chat_line("3", model="a"), chat_line("4", model="zz"))
    batch = await finished(http, await begin(http, *lines))
    assert (batch["status"], batch["model"]) == ("completed", "b")
    assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
    assert set(await results(http, batch["output_file_id"])) == {"1", "2"}
    refused = await results(http, batch["error_file_id"])
    assert (refused["3"]["status_code"], refused["4"]["status_code"]) == (400, 404)
    assert "the batch is for 'b': put requests for other models into a file of their own" in json.dumps(refused["3"])
    assert "model 'zz' not found; this server has 'a', 'b'" in json.dumps(refused["4"])
    assert fleet.history == ["+b"]  # no model is loaded to refuse a line


async def test_a_job_for_an_unknown_model_is_refused_when_it_comes(http, fleet):
    refused = await begin(http, chat_line("1", model="zz"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert (await http.get("/v1/batches")).json()["data"] == []


async def test_a_request_that_needs_the_memory_of_a_jobs_model_is_answered_between_the_jobs(http, fleet):
    job = await begin(http, *(chat_line(str(number), model="a") for number in range(40)))
    fleet.is_paused = True
    async with asyncio.timeout(PATIENCE_S):
        while "a" not in fleet.engines or not fleet.engines["a"].live:
            await asyncio.sleep(0.002)
    asked = asyncio.create_task(http.post("/v1/completions", json={"model": "b", "prompt": "x", "max_tokens": 99}))
    await asyncio.sleep(0.05)
    assert fleet.history == ["+a"]  # running requests are not cut off
    engine = fleet.engines["a"]
    num_begun = len(engine.submissions)
    fleet.is_paused = False
    fleet.go_on()
    answer = await asked
    assert answer.json()["choices"][0]["text"] == REPLY
    assert len(engine.submissions) == num_begun < 40  # none of the job's began while it waited
    batch = await finished(http, job)
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert fleet.history == ["+a", "-a", "+b", "-b", "+a"]


async def test_a_job_whose_model_cannot_be_loaded_waits_and_leaves_other_requests_alone(http, fleet, monkeypatch):
    monkeypatch.setattr("moeflow.server.jobs.worker.LOAD_RETRY_S", 0.02)
    fleet.problem = "has no room"
    job = await begin(http, chat_line("1", model="b"))
    await asyncio.sleep(0.1)
    batch = (await http.get(f"/v1/batches/{job.json()['id']}")).json()
    assert (batch["status"], batch["request_counts"]["failed"]) == ("in_progress", 0)
    fleet.problem = ""
    assert (await finished(http, job))["request_counts"]["completed"] == 1


async def test_a_job_goes_on_after_a_restart(tokenizer, tmp_path: Path, fleet, http):
    fleet.is_paused = True
    lines = (chat_line("1", model="b"), chat_line("2", model="b"))
    job = await begin(http, *lines)
    async with asyncio.timeout(PATIENCE_S):
        while "b" not in fleet.engines or not fleet.engines["b"].live:
            await asyncio.sleep(0.002)
    await fleet.app.state.jobs.close()
    again = make_fleet(tokenizer)
    jobs = again.app.state.jobs = Jobs(tmp_path / "data", again.app.state.service)
    jobs.worker.wake()
    async with connect(again.app) as client:
        batch = await finished(client, job)
    await jobs.close()
    assert (batch["model"], batch["request_counts"]["completed"]) == ("b", 2)
    assert again.history == ["+b"]
