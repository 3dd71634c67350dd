"""`GET /stats/timeline`: the passes of a real engine as Perfetto's JSON, and engines beside each other."""

from __future__ import annotations

import msgspec
import pytest

from moeflow import LLM
from moeflow.core.observation import TimelineSight
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.engine.generator import Generator
from moeflow.pipeline.runtime.recording import recording_of
from moeflow.pipeline.runtime.trace import Label, Trace
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.server.conftest import connect
from tests.server.stories.real_client import RealClient
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.anyio
LAYERS = 3
BODY = {"prompt": "Hello", "max_tokens": 10, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_hidden_layers=LAYERS)
    with LLM(str(folder), num_threads=1) as llm:
        yield llm


@pytest.fixture
async def real(llm):
    async with connect(create_app(Generator(RealClient(llm), llm.tokenizer), ServerConfig())) as http:
        yield http
    llm._engine._end_observing()


async def get(http, passes=64):
    response = await http.get(f"/stats/timeline?passes={passes}")
    assert response.status_code == 200, response.text
    return response.json()


def slices(timeline, row):
    """The slices of a row, by their begin."""
    events = timeline["traceEvents"]
    (number,) = {it["tid"] for it in events if it["name"] == "thread_name" and it["args"]["name"] == row}
    return sorted((it for it in events if it["ph"] == "X" and it["tid"] == number), key=lambda it: it["ts"])


async def test_the_passes_of_a_request_appear_once_somebody_has_asked(real):
    empty = await get(real)
    assert empty["traceEvents"] == []
    assert "recording has begun" in empty["otherData"]["note"]
    answer = (await real.post("/v1/completions", json=BODY)).json()
    timeline = await get(real)
    passes = slices(timeline, "passes")
    facts = timeline["otherData"]
    assert (facts["num_passes"], facts["note"], facts["model"]) == (10, "", answer["model"])
    assert abs(facts["started_s"] - answer["created"]) < 60
    assert len(passes) == 10, "one for the prompt, one for each token but the first"
    assert passes[0]["name"].startswith("prompt pass of ")
    assert all(it["args"]["requests"][0].startswith(answer["id"]) for it in passes)
    assert passes[0]["ts"] == 0
    for row in ("attention", "router", "experts"):
        parts = slices(timeline, row)
        assert [it["args"]["layer"] for it in parts] == 10 * list(range(LAYERS))
        assert {it["cat"] for it in parts} == {"work"}
        for one, first in zip(passes, parts[::LAYERS], strict=True):
            last = parts[parts.index(first) + LAYERS - 1]
            assert one["ts"] < first["ts"]
            assert last["ts"] + last["dur"] < one["ts"] + one["dur"]
    newest = slices(await get(real, passes=2), "passes")
    assert [it["dur"] for it in newest] == [it["dur"] for it in passes[-2:]]


@pytest.mark.parametrize(("host", "has_ids"), [("127.0.0.1", True), ("0.0.0.0", False)])
async def test_ids_of_others_are_not_shown_where_they_open_texts(make_app, engine, host, has_ids):
    trace = Trace()
    trace.row("passes").record(Label("decode pass", flops=7, requests=("cmpl-1-0-0",)), 5, 9)
    engine.sights[0] = TimelineSight(msgspec.msgpack.encode(recording_of(trace, 5, 1, 10**18, None)))
    async with connect(make_app(host=host)) as http:
        (found,) = slices(await get(http), "passes")
    assert found["args"] == ({"flops": 7, "requests": ["cmpl-1-0-0"]} if has_ids else {"flops": 7})


@pytest.mark.parametrize("query", ["passes=0", "passes=65", "passes=x", "model=other"])
async def test_wrong_questions_are_refused(http, query):
    response = await http.get(f"/stats/timeline?{query}")
    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"]


async def test_an_engine_that_does_not_answer_in_time_is_busy(http):
    response = await http.get("/stats/timeline")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_busy"
    assert response.headers["retry-after"] == "1"


async def test_a_key_is_needed_where_there_are_keys(make_app):
    async with connect(make_app(api_key="secret")) as http:
        assert (await http.get("/stats/timeline")).status_code == 401


async def test_engines_are_processes_on_one_clock(http, engine):
    """The second engine's clock began a second later; its pass was half a millisecond after the first one's."""
    for place, (clock_ns, start_ns) in enumerate([(10**18, 5 * 10**9), (10**18 + 10**9, 4 * 10**9 + 500_000)]):
        trace = Trace()
        trace.row("passes").record(Label("decode pass of 1 token, 1 request"), start_ns, start_ns + 1000)
        trace.row("experts").record(Label("waits for experts", 3), start_ns, start_ns + 10, is_blocked=True)
        recording = recording_of(trace, start_ns, 1, clock_ns, None)
        engine.sights[place] = TimelineSight(msgspec.msgpack.encode(recording))
    engine.replica_statuses = [ReplicaStatus(EngineState.READY, engine.snapshot, host=host) for host in ("", "b")]
    timeline = await get(http)
    events = timeline["traceEvents"]
    names = {it["pid"]: it["args"]["name"] for it in events if it["name"] == "process_name"}
    assert names == {1: "engine 0", 2: "engine 1 on b"}
    assert [(it["pid"], it["ts"]) for it in events if it["ph"] == "X" and it["cat"] == "work"] == [(1, 0), (2, 500)]
    assert [it["name"] for it in events if it.get("cat") == "blocked"] == ["waits for experts 3"] * 2
    assert timeline["otherData"]["started_s"] == pytest.approx(1e9 + 5)
    assert engine.questions[-1].num_passes == 64
