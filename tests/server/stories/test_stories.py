"""`/stats/requests`: the stories of requests through the real application, by each API."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import numpy as np
import pytest

from moeflow.core.observation import PassSight, RequestQuestion, RequestSight, SequenceSight
from moeflow.engine.client import ReplicaStatus
from moeflow.server.api.request_stories import StoriesResponse
from moeflow.server.stories import stories
from moeflow.server.stories.story import Story
from tests.server.conftest import connect
from tests.server.fake_client import NAME
from tests.server.live_server import serve_in_thread
from tests.server.rpc.calling import calling
from tests.server.rpc.test_messages import message

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
ORDER = ["received", "tokenized", "queued", "prompt", "decode", "sent"]


async def listed(http, **query) -> list[dict]:
    response = await http.get("/stats/requests", params=query)
    assert response.status_code == 200, response.text
    StoriesResponse.model_validate(response.json(), strict=True, extra="forbid")
    return response.json()["requests"]


async def story(http, request_id: str) -> dict:
    response = await http.get(f"/stats/requests/{request_id}")
    assert response.status_code == 200, response.text
    return response.json()


async def has_running(http, count: int = 1) -> list[dict]:
    """Wait until so many run, and return them."""
    async with asyncio.timeout(5):
        while len(found := await listed(http, state="running")) != count:
            await asyncio.sleep(0.005)
    return found


async def test_refused_requests_are_listed_and_displace_no_other(http):
    answer = await http.post("/v1/chat/completions", json=CHAT)
    refused = await http.post("/v1/chat/completions", json={**CHAT, "model": "wrong"})
    assert refused.status_code == 404
    assert (await http.get("/v1/models/wrong")).status_code == 404  # it asks for no tokens
    found, other = await listed(http)
    assert (found["state"], found["status"], found["endpoint"]) == ("refused", 404, "/v1/chat/completions")
    told = await story(http, refused.headers["x-request-id"])
    assert "wrong" in told["error"]
    assert (told["slow_because"], told["not_observed"]) == ([], "")
    assert other["id"] == answer.headers["x-request-id"]
    for _ in range(stories.MAX_REFUSED + 1):
        await http.post("/v1/completions", json={"prompt": 1.5})
    assert len(await listed(http, state="refused")) == stories.MAX_REFUSED
    assert len(await listed(http, state="done")) == 1


async def test_the_story_of_an_answer_has_the_numbers_of_its_usage(http, engine):
    engine.num_cached_tokens = 3
    answer = await http.post("/v1/chat/completions", json=CHAT)
    usage = answer.json()["usage"]
    found = await story(http, answer.headers["x-request-id"])
    assert found["id"] == answer.headers["x-request-id"]
    assert found["object_id"] == answer.json()["id"]
    assert (found["endpoint"], found["model"], found["key"]) == ("/v1/chat/completions", NAME, None)
    assert (found["state"], found["end"], found["error"]) == ("done", "length", None)
    assert found["prompt_tokens"] == usage["prompt_tokens"]
    assert found["completion_tokens"] == usage["completion_tokens"] == 5
    assert found["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert (found["sequences"], found["sequences_ahead"]) == (1, 0)
    assert await story(http, answer.json()["id"]) == found


async def test_phases_are_all_of_the_time(http, engine):
    engine.pause_after = 1
    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5}))
    await has_running(http)
    await asyncio.sleep(0.4)  # more than the 0.25 s that the engine claims to have queued it
    engine.pause_after = None
    found = await story(http, (await asking).headers["x-request-id"])
    phases = found["phases"]
    assert [phase["name"] for phase in phases] == ORDER
    ends = [0.0, *(phase["start_s"] + phase["duration_s"] for phase in phases)]
    assert [phase["start_s"] for phase in phases] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(found["total_s"])
    assert all(phase["duration_s"] >= 0 for phase in phases)
    lasted = {phase["name"]: phase["duration_s"] for phase in phases}
    assert lasted["decode"] >= 0.4
    assert found["slowest_gap_s"] == pytest.approx(lasted["decode"], rel=0.2)
    assert found["slowest_gap_at"] == 1
    assert found["tokens_per_s"] == pytest.approx(4 / lasted["decode"], rel=0.1)
    assert found["first_token_s"] == pytest.approx(phases[4]["start_s"])


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/chat/completions", CHAT, lambda body: body["usage"]["completion_tokens"]),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 4}, lambda body: body["usage"]["completion_tokens"]),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}, lambda body: body["usage"]["output_tokens"]),
        ("/v1/messages", CHAT, lambda body: body["usage"]["output_tokens"]),
        ("/api/chat", {"messages": CHAT["messages"], "stream": False}, lambda body: body["eval_count"]),
        ("/api/generate", {"prompt": "Hi", "stream": False}, lambda body: body["eval_count"]),
        ("/v1/embeddings", {"input": "Hi"}, lambda _: 0),
        ("/api/embed", {"input": ["Hi", "Ho"]}, lambda _: 0),
    ],
)
async def test_each_api_has_stories(http, path, body, count):
    answer = await http.post(path, json={"model": NAME, **body})
    assert answer.status_code == 200, answer.text
    (found,) = await listed(http)
    assert found["endpoint"] == path
    assert found["id"] == answer.headers["x-request-id"]
    assert (found["state"], found["completion_tokens"]) == ("done", count(answer.json()))
    assert found["prompt_tokens"] > 0
    assert {phase["name"] for phase in found["phases"]} >= {"received", "queued", "prompt", "sent"}


async def test_a_stream_has_the_story_of_a_whole_answer(http):
    answer = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    found = await story(http, answer.headers["x-request-id"])
    assert (found["state"], found["end"], found["completion_tokens"]) == ("done", "length", 5)


async def test_sequences_and_drafts_add_up(http, engine):
    engine.drafts_per_pass = 3
    answer = await http.post("/v1/completions", json={"prompt": ["ab", "cde"], "n": 2, "max_tokens": 8})
    found = await story(http, answer.headers["x-request-id"])
    assert found["sequences"] == 4
    assert found["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"] == 5
    assert found["completion_tokens"] == answer.json()["usage"]["completion_tokens"] == 32
    assert (found["drafted_tokens"], found["accepted_tokens"]) == (48, 24)  # 3 right and 3 wrong ones in each pass


async def test_running_requests_are_there_and_come_to_an_end(http, engine):
    engine.pause_after = 2
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
    (running,) = await has_running(http)
    async with asyncio.timeout(5):
        while (running := await story(http, running["id"]))["completion_tokens"] < 2:
            await asyncio.sleep(0.005)
    assert (running["state"], running["end"]) == ("running", "")
    assert running["phases"][-1]["name"] == "decode"
    engine.pause_after = None
    await asking
    assert await listed(http, state="running") == []
    assert (await story(http, running["id"]))["state"] == "done"


async def test_before_the_first_output_nothing_tells_queue_from_prompt(http, engine):
    engine.pause_after = 0
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
    (running,) = await has_running(http)
    async with asyncio.timeout(5):
        while "brought nothing" not in (running := await story(http, running["id"]))["slow_because"][0]["text"]:
            await asyncio.sleep(0.005)
    assert [phase["name"] for phase in running["phases"]] == ["received", "tokenized", "waiting"]
    engine.pause_after = None
    await asking


async def test_those_that_were_there_first_are_counted(http, engine):
    engine.pause_after = 0
    asking = [asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "n": 2}))]
    await has_running(http)
    asking.append(asyncio.create_task(http.post("/v1/completions", json={"prompt": "b"})))
    newest, oldest = await has_running(http, 2)
    assert (oldest["sequences_ahead"], newest["sequences_ahead"]) == (0, 2)
    engine.pause_after = None
    await asyncio.gather(*asking)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails(http, engine, stream):
    engine.fail_after = 2
    answer = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    found = await story(http, answer.headers["x-request-id"])
    assert (found["state"], found["end"], found["error"]) == ("failed", "generation_failed", "out of memory")
    assert found["completion_tokens"] == 2
    assert await listed(http, state="failed") == [{k: v for k, v in found.items() if k in (await listed(http))[0]}]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(app, engine, stream):
    engine.pause_after = 2
    with serve_in_thread(app) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json={**CHAT, "stream": stream}))
            (running,) = await has_running(http)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await has_running(http, 0)
            found = await story(http, running["id"])
    assert (found["state"], found["end"], found["error"]) == ("stopped", "disconnected", None)
    assert found["phases"][-1]["name"] == "sent"


async def test_what_generates_nothing_has_no_story(http):
    await http.post("/tokenize", json={"prompt": "Hi"})
    await http.post("/tokenize", json={"prompt": 1.5})
    await http.get("/v1/models")
    assert await listed(http) == []


async def test_the_last_200_are_kept(http, monkeypatch):
    ids = []
    for number in range(stories.MAX_STORIES + 5):
        headers = {"x-request-id": f"mine/{number}"}
        answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
        ids.append(answer.headers["x-request-id"])
    assert [it["id"] for it in await listed(http)] == ids[:-201:-1]
    assert (await story(http, ids[5]))["id"] == "mine/5"
    tokens = await http.get("/stats/requests/mine/5/tokens")
    assert tokens.json()["error"]["code"] == "request_not_observed"
    gone = await http.get(f"/stats/requests/{ids[4]}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")


async def test_the_newest_of_one_id_counts(http):
    headers = {"x-request-id": "again"}
    for count in (1, 2):
        body = {"prompt": "a", "max_tokens": count}
        await http.post("/v1/completions", json=body, headers=headers)
    assert (await story(http, "again"))["completion_tokens"] == 2


async def test_the_list_is_of_one_model(http):
    await http.post("/v1/completions", json={"prompt": "a"})
    assert len(await listed(http, model=NAME)) == 1
    assert (await http.get("/stats/requests", params={"model": "other"})).status_code == 404
    assert (await http.get("/stats/requests", params={"state": "odd"})).status_code == 400


def observed(sequence_id: str = "x-0-0", *, counts: bytes) -> SequenceSight:
    """A sequence of five prompt tokens and one pass."""
    return SequenceSight(
        sequence_id=sequence_id,
        is_running=False,
        num_prompt_tokens=5,
        num_cached_tokens=0,
        num_output_tokens=1,
        queued_s=0.5,
        submitted_s=7.0,
        passes=[PassSight(0.5, 0.25, 5, 9, True, 0, 0, 0.125, 4096)],
        counts=counts,
        drafts=[],
        output_token_ids=[],
    )


async def test_forgotten_experts_are_said_to_be_missing(http, engine):
    counts = np.array([[3, 0, 7], [5, 5, 0]], "<i8").tobytes()
    sequences = [observed("x-0-0", counts=b""), observed("x-0-1", counts=counts)]
    answer = await http.post("/v1/completions", json={"prompt": "abcde", "max_tokens": 1, "n": 2})
    for shown, expected in ((sequences, [[3, 0, 7], [5, 5, 0]]), (sequences[:1] * 2, None)):
        engine.sights = {0: RequestSight(layers=[1, 3], num_experts=3, sequences=shown)}
        found = await story(http, answer.headers["x-request-id"])
        assert (found["experts"] and found["experts"]["counts"]) == expected
        assert "a part of its passes" in found["not_observed"]


async def test_the_replica_that_computed_it_is_named(http, engine):
    sequence = observed(counts=np.array([[3, 0, 7], [5, 5, 0]], "<i8").tobytes())
    engine.replica_statuses = [ReplicaStatus(engine.state, engine.snapshot, host=host) for host in ("a", "b")]
    nothing = RequestSight(layers=[1, 3], num_experts=3, sequences=[])
    engine.sights = {0: nothing, 1: msgspec.structs.replace(nothing, sequences=[sequence])}
    answer = await http.post("/v1/completions", json={"prompt": "abcde", "max_tokens": 1})
    found = await story(http, answer.headers["x-request-id"])
    assert engine.questions == [RequestQuestion(answer.json()["id"])]
    assert (found["replica"], found["host"], found["not_observed"]) == (1, "b", "")
    assert (found["stall_s"], found["read_bytes"]) == (0.125, 4096)
    assert found["experts"] == {"layers": [1, 3], "num_experts": 3, "top_k": 2, "counts": [[3, 0, 7], [5, 5, 0]]}
    queued = next(phase for phase in found["phases"] if phase["name"] == "queued")
    (seen,) = found["passes"]
    assert seen["start_s"] == pytest.approx(queued["start_s"] + 0.5)
    assert (seen["tokens"], seen["pass_tokens"], seen["is_prompt"]) == (5, 9, True)
    engine.replica_statuses = engine.replica_statuses[:1]  # the second one has been removed since
    assert (await story(http, answer.headers["x-request-id"]))["host"] is None
    engine.sights = {0: nothing}
    assert "not observed" in (await story(http, answer.headers["x-request-id"]))["not_observed"]
    engine.sights = {}
    assert "does not answer" in (await story(http, answer.headers["x-request-id"]))["not_observed"]


async def test_no_text_is_in_a_story(http):
    secret = "xyzzy-secret"
    answer = await http.post("/v1/completions", json={"prompt": secret, "max_tokens": 30})
    text = answer.json()["choices"][0]["text"]
    found = json.dumps([await listed(http), await story(http, answer.json()["id"])], ensure_ascii=False)
    assert secret not in found
    assert text not in found


async def test_a_request_that_ends_while_another_process_is_asked_appears_once(app, http):
    kept = app.state.service.stories
    await http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
    (done,) = await kept.all()

    async def running() -> list[Story]:
        told = [msgspec.structs.replace(done, object_id="cmpl-other", state="running")]
        kept.keep(msgspec.structs.replace(done, object_id="cmpl-other"))  # before the answer of a slower process
        return told

    leave = kept.ask_also(running)
    assert {(it.object_id, it.state) for it in await kept.all()} == {(done.object_id, "done"), ("cmpl-other", "done")}
    assert len(kept._finished) == 2
    leave()


class TestWhoMaySee:
    async def test_a_key_sees_its_own(self, make_app, tmp_path):
        (tmp_path / "keys.toml").write_text("[alice]\nkey = 'a'\n[bob]\nkey = 'b'\n")
        async with connect(make_app(api_keys_file=tmp_path / "keys.toml")) as http:
            alice, bob = ({"x-api-key": key} for key in "ab")
            answer = await http.post("/v1/completions", json={"prompt": "Hi"}, headers=alice)
            path = f"/stats/requests/{answer.headers['x-request-id']}"
            seen = (await http.get("/stats/requests", headers=alice)).json()["requests"]
            assert [(it["key"], it["id"]) for it in seen] == [("alice", answer.headers["x-request-id"])]
            assert (await http.get(path, headers=alice)).status_code == 200
            assert (await http.get("/stats/requests", headers=bob)).json() == {"requests": []}
            assert (await http.get(path, headers=bob)).status_code == 404
            assert (await http.get(path)).status_code == 401
            assert (await http.get("/stats/requests")).status_code == 401

    @pytest.mark.parametrize(
        "config",
        [
            {"host": "0.0.0.0"},
            {"allowed_hosts": ("llm.example",)},
            {"root_path": "/llm"},
            {"forwarded_allow_ips": "10.0.0.1"},
        ],
    )
    async def test_where_others_can_ask_an_id_is_the_key(self, make_app, config):
        async with connect(make_app(**config)) as http:
            answer = await http.post("/v1/completions", json={"prompt": "Hi"})
            (found,) = await listed(http)
            assert (found["id"], found["object_id"], found["state"]) == ("", "", "done")
            assert (await story(http, answer.headers["x-request-id"]))["object_id"] == answer.json()["id"]
            assert (await http.get("/stats/requests/")).status_code == 404

    async def test_where_others_can_ask_an_id_that_can_be_guessed_opens_nothing(self, make_app):
        for host, status in (("127.0.0.1", 200), ("0.0.0.0", 404)):
            async with connect(make_app(host=host)) as http:
                headers = {"x-request-id": "1"}
                answer = await http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
                assert (await http.get("/stats/requests/1")).status_code == status
                assert (await http.get(f"/stats/requests/{answer.json()['id']}")).status_code == 200

    @pytest.mark.parametrize("site", ["cross-site", "same-site", "same-origin"])
    async def test_a_page_of_an_allowed_origin_gets_no_ids(self, make_app, site):
        async with connect(make_app(cors_origins=("https://elsewhere.example",))) as http:
            await http.post("/v1/completions", json={"prompt": "Hi"})
            headers = {"Origin": "https://elsewhere.example", "Sec-Fetch-Site": site}
            response = await http.get("/stats/requests", headers=headers)
            (found,) = response.json()["requests"]
            assert response.headers["access-control-allow-origin"] == "https://elsewhere.example"
            assert bool(found["id"]) == (site == "same-origin")


async def test_a_call_by_grpc_has_a_story(app):
    async with calling(app) as caller, connect(app) as http:
        call = caller.Complete(message("CompletionRequest", prompt=["Hi"], max_tokens=3))
        answer = await call
        (found,) = await listed(http)
    assert (found["endpoint"], found["object_id"]) == ("/v1/completions", answer.id)
    assert found["completion_tokens"] == answer.usage.completion_tokens == 3
    assert found["id"] == dict(await call.initial_metadata())["x-request-id"]
