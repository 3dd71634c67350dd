"""Several models behind one application, with engines that say fixed texts: loaded models, waiting and informed
clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from moeflow.core.engine_messages import EngineStats
from moeflow.engine.client import EngineState
from moeflow.server import sse
from moeflow.server.guard.large_bodies import LARGE_BYTES, LargeBodies
from tests.patience import PATIENCE_S
from tests.server.conftest import connect
from tests.server.events import read_events
from tests.server.fake_client import REPLY
from tests.server.fleet import Fleet, make_fleet
from tests.server.observed.test_status import read_metrics

pytestmark = pytest.mark.anyio
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

PROMPT = {"prompt": "x", "max_tokens": 100}


@pytest.fixture
def fleet(tokenizer) -> Fleet:
    return make_fleet(tokenizer)


async def ask(fleet: Fleet, model: str | None = None, **more):
    async with connect(fleet.app) as http:
        named = {} if model is None else {"model": model}
        return await http.post("/v1/completions", json=PROMPT | named | more)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


async def test_what_fits_is_loaded_side_by_side_and_what_was_used_least_recently_goes(fleet):
    for name in ("b", "c", "b", "a"):
        response = await ask(fleet, name)
        assert (response.status_code, response.json()["model"]) == (200, name)
        assert response.json()["choices"][0]["text"] == REPLY
    assert fleet.history == ["+b", "+c", "-c", "-b", "+a"] or fleet.history == ["+b", "+c", "-c", "+a"]
    assert fleet.status["c"] == "unloaded"


async def test_no_more_is_unloaded_than_is_needed(fleet):
    for name in ("c", "b", "c", "a"):  # a and c fit at once, and c was used last
        assert (await ask(fleet, name)).status_code == 200
    assert fleet.history == ["+c", "+b", "-b", "+a"]
    assert fleet.status == {"a": "ready", "b": "unloaded", "c": "ready", "huge": "unloaded"}


async def test_a_model_of_unknown_size_is_alone(fleet):
    for name in ("b", "c", "huge", "c"):
        assert (await ask(fleet, name)).status_code == 200
    assert fleet.history == ["+b", "+c", "-b", "-c", "+huge", "-huge", "+c"]


async def test_requests_for_one_model_share_its_loading(fleet):
    fleet.load_s = 0.05
    answers = await asyncio.gather(*(ask(fleet, "a") for _ in range(3)), ask(fleet, "b"), ask(fleet))
    assert [answer.json()["model"] for answer in answers] == ["a", "a", "a", "b", "a"]
    assert fleet.history == ["+a", "-a", "+b"]  # and all of a's were answered before it went


async def test_a_stream_has_heartbeats_while_its_model_is_loaded(fleet, monkeypatch):
    monkeypatch.setattr(sse, "PING_S", 0.02)
    fleet.load_s = 0.1
    body = (await ask(fleet, "a", stream=True)).text
    assert body.startswith(": ping\n\n")
    assert REPLY[:2] in "".join(chunk["choices"][0]["text"] for chunk in read_events(body.replace(": ping\n\n", "")))


async def test_an_unknown_name_is_told_what_there_is(fleet):
    response = await ask(fleet, "d")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "model 'd' not found; this server has 'a', 'b', 'c', 'huge'"
    assert fleet.history == []


async def test_the_list_names_all_and_loads_none(fleet):
    await ask(fleet, "b")
    async with connect(fleet.app) as http:
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(it["id"], it["status"], it["max_model_len"]) for it in cards] == [
            ("a", "unloaded", None),
            ("b", "ready", 256),
            ("c", "unloaded", None),
            ("huge", "unloaded", None),
        ]
        assert (await http.get("/v1/models/c")).json() == cards[2]
        assert (await http.get("/v1/models/d")).status_code == 404
    assert fleet.history == ["+b"]


async def test_a_model_at_work_stays_and_who_needs_its_memory_waits(fleet):
    fleet.is_paused = True
    working = asyncio.create_task(ask(fleet, "a"))
    await until(lambda: "a" in fleet.engines and bool(fleet.engines["a"].live))
    fleet.is_paused = False
    waiting = asyncio.create_task(ask(fleet, "b"))
    await until(lambda: fleet.status["b"] == "loading")
    await asyncio.sleep(0.1)
    assert fleet.history == ["+a"]
    fleet.go_on()
    assert (await working).json()["choices"][0]["text"] == REPLY
    assert (await waiting).json()["model"] == "b"
    assert fleet.history == ["+a", "-a", "+b"]


async def test_who_waits_too_long_is_told_who_is_at_work(tokenizer):
    fleet = make_fleet(tokenizer, max_wait_s=0.05)
    fleet.is_paused = True
    working = [asyncio.create_task(ask(fleet, "b", stream=True)), asyncio.create_task(ask(fleet, "c"))]
    await until(lambda: len(fleet.engines) == 2 and all(engine.live for engine in fleet.engines.values()))
    response = await ask(fleet, "a")
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    error = response.json()["error"]
    assert error["code"] == "models_busy"
    assert error["message"] == "There is no memory for 'a' (60 B) now: 'b', 'c' are at work; try again soon"
    assert fleet.status == {"a": "unloaded", "b": "ready", "c": "ready", "huge": "unloaded"}
    fleet.go_on()
    assert [(await each).status_code for each in working] == [200, 200]
    fleet.is_paused = False
    assert (await ask(fleet, "a")).status_code == 200


async def test_new_requests_do_not_keep_a_model_at_work_for_ever(tokenizer):
    fleet = make_fleet(tokenizer, patience_s=0.0)
    fleet.is_paused = True
    first = asyncio.create_task(ask(fleet, "a"))
    await until(lambda: "a" in fleet.engines and bool(fleet.engines["a"].live))
    waiting = asyncio.create_task(ask(fleet, "b"))
    await until(lambda: fleet.app.state.service.models._wanted_since_s is not None)
    late = asyncio.create_task(ask(fleet, "a"))
    await asyncio.sleep(0.05)
    assert len(fleet.engines["a"].submissions) == 1, "a new request has gone before the one that waits"
    fleet.is_paused = False
    fleet.go_on()
    assert {(await each).status_code for each in (first, waiting, late)} == {200}
    assert fleet.history == ["+a", "-a", "+b", "-b", "+a"]


async def test_tokenizing_keeps_a_model_and_loads_it_too(fleet):
    async with connect(fleet.app) as http:
        counted = await http.post("/tokenize", json={"model": "c", "prompt": "abc"})
        assert (counted.status_code, counted.json()["max_model_len"]) == (200, 256)
        assert (await http.post("/detokenize", json={"model": "d", "tokens": [5]})).status_code == 404
    assert fleet.history == ["+c"]
    assert all(model.is_idle for model in fleet.app.state.service.models.all)


async def test_a_model_that_is_unloaded_while_a_long_history_is_read_is_loaded_again(fleet, monkeypatch):
    async with connect(fleet.app) as http:
        items = [{"role": "user", "content": "x"}, *[{"type": "reasoning", "summary": []}] * 1000]  # few tokens
        first = await http.post("/v1/responses", json={"model": "b", "input": items})
        body = {"model": "b", "input": "y", "previous_response_id": first.json()["id"]}
        read = LargeBodies.read

        async def read_slowly(self, num_bytes, *rest):
            if num_bytes > LARGE_BYTES:
                assert (await ask(fleet, "a")).status_code == 200
            return await read(self, num_bytes, *rest)

        monkeypatch.setattr(LargeBodies, "read", read_slowly)
        second = await http.post("/v1/responses", json=body)
    assert second.status_code == 200, second.text
    assert fleet.history == ["+b", "-b", "+a", "-a", "+b"]


async def test_a_model_that_cannot_be_loaded_is_an_error_of_its_request_alone(fleet):
    assert (await ask(fleet, "b")).status_code == 200
    fleet.problem = "is damaged"
    failed = await asyncio.gather(ask(fleet, "c"), ask(fleet, "c"))
    for response in failed:
        assert response.status_code == 500
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_load_failed", "model")
        assert error["message"] == "The model 'c' cannot be loaded: c is damaged"  # without its place
    assert (await ask(fleet, "b")).status_code == 200
    fleet.problem = ""
    assert (await ask(fleet, "c")).status_code == 200
    assert fleet.history == ["+b", "+c"]


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/v1/completions", {"prompt": "x", "guided_json": "[]"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "guided_json": "[]"}),
        (
            "/v1/messages",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "none", "content": "x"}]}
                ],
                "max_tokens": 5,
            },
        ),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "none", "output": "x"}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL, TOOL]}),
    ],
)
async def test_a_wrong_request_loads_nothing(fleet, path, wrong):
    async with connect(fleet.app) as http:
        response = await http.post(path, json=wrong | {"model": "b"})
    assert response.status_code == 400, response.text
    assert fleet.history == []


async def test_a_model_whose_engine_died_for_good_is_loaded_again(fleet):
    fleet.is_paused = True
    broken = asyncio.create_task(ask(fleet, "b"))
    await until(lambda: "b" in fleet.engines and bool(fleet.engines["b"].live))
    fleet.is_paused = False
    fleet.engines["b"].die()
    response = await broken
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    fleet.deaths["b"]()
    assert fleet.status["b"] == "unloaded"
    async with connect(fleet.app) as http:
        assert (await http.get("/health")).json() == {
            "status": "ready",
            "num_replicas": 0,
            "num_replicas_ready": 0,
            "starting": [],
        }
    assert (await ask(fleet, "b")).status_code == 200


async def test_too_many_that_wait_for_a_load_are_refused(tokenizer):
    fleet = make_fleet(tokenizer, max_queue=1)
    fleet.load_s = 0.05
    answers = await asyncio.gather(*(ask(fleet, "a") for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429]


async def test_numbers_of_each_model_and_of_all(fleet):
    for name in ("b", "c", "a"):
        await ask(fleet, name)
    fleet.engines["a"].snapshot = EngineStats(generated_tokens_total=5, num_running=2)
    async with connect(fleet.app) as http:
        values = await read_metrics(http)
        both, only_b = [(await http.get("/stats", params=params)).json() for params in ({}, {"model": "b"})]
        health = (await http.get("/health")).json()
    expected = {
        "model_loaded": {"a": 1, "b": 0, "c": 1},
        "model_memory_bytes": {"a": 60, "b": 0, "c": 40},
        "generated_tokens_total": {"a": 5, "b": 7, "c": 7},  # unloaded ones included
        "requests_running": {"a": 2, "b": 0, "c": 0},
        "model_loads_total": {"a": 1, "b": 1, "c": 1, "huge": 0},
    }
    for metric, of_models in expected.items():
        assert {name: values[f"moeflow_{metric}[{name}]"] for name in of_models} == of_models
    assert {name for name in values if name.startswith("moeflow_replica_ready")} == {
        "moeflow_replica_ready[][a][0]",
        "moeflow_replica_ready[][c][0]",
    }
    assert values["moeflow_request_duration_seconds_count[b]"] == 1
    assert (both["model"], both["num_running"], both["generated_tokens_total"]) == (None, 2, 19)
    assert (only_b["model"], only_b["num_running"], only_b["generated_tokens_total"]) == (None, 0, 7)
    assert [(it["name"], it["status"]) for it in both["models"]] == list(fleet.status.items())
    assert health == {"status": "ready", "num_replicas": 2, "num_replicas_ready": 2, "starting": []}


async def test_the_end_lets_running_requests_finish_and_tells_who_waits(fleet):
    fleet.is_paused = True
    running = asyncio.create_task(ask(fleet, "a"))
    await until(lambda: "a" in fleet.engines and bool(fleet.engines["a"].live))
    waiting = asyncio.create_task(ask(fleet, "b"))
    await until(lambda: fleet.status["b"] == "loading")
    service = fleet.app.state.service
    service.drain()
    ending = asyncio.create_task(service.models.shutdown(30.0))
    refused = await asyncio.wait_for(waiting, PATIENCE_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert (await ask(fleet, "a")).json()["error"]["code"] == "shutting_down"
    fleet.go_on()
    assert (await running).status_code == 200
    await ending
    assert fleet.history == ["+a", "-a"]
    assert fleet.engines["a"].state is EngineState.GONE
