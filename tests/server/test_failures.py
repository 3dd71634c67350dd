"""What clients see when the engine fails, dies, or the server is about to end: an error, never a hang."""

from __future__ import annotations

import asyncio
import json

import pytest

from moeflow.engine.client import EngineState
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.server.conftest import connect
from tests.server.events import read_broken_events

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "Hello", "max_tokens": 100}


async def under_way(engine, number: int = 1) -> None:
    while len(engine.live) < number:
        await asyncio.sleep(0.002)


async def test_a_failed_pass_is_an_error_of_that_request(http, engine, app):
    engine.fail_after = 3
    response = await http.post(COMPLETIONS, json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "out of memory"
    chunks, error = read_broken_events((await http.post(COMPLETIONS, json={**BODY, "stream": True})).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Gr"  # the third token is half a character
    assert error["message"] == "out of memory"
    assert app.state.service.models.num_unfinished == 0
    engine.fail_after = None
    assert (await http.post(COMPLETIONS, json=BODY)).status_code == 200


async def test_one_failed_sequence_ends_its_mates(http, engine, app):
    engine.fail_after = 5
    assert (await http.post(COMPLETIONS, json={**BODY, "prompt": ["a", "b"], "n": 2})).status_code == 500
    assert not engine.live
    assert app.state.service.models.num_unfinished == 0


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
async def test_the_engine_dies_while_it_works(http, engine, app, prompt):
    engine.pause_after = 2
    body = {**BODY, "prompt": prompt}
    waiting = asyncio.create_task(http.post(COMPLETIONS, json=body))
    streaming = asyncio.create_task(http.post(COMPLETIONS, json={**body, "stream": True}))
    await under_way(engine, 2 * len(prompt))
    engine.die()
    response = await waiting
    assert response.status_code == 503
    assert "died" in response.json()["error"]["message"]
    _, error = read_broken_events((await streaming).text)
    assert error["code"] == "engine_unavailable"
    assert app.state.service.models.num_unfinished == 0


async def test_a_dead_engine_is_no_health(http, engine):
    assert (await http.get("/health")).status_code == 200
    engine.die()
    for path in ("/health", "/ready"):
        response = await http.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_unavailable"
    assert (await http.post(COMPLETIONS, json=BODY)).status_code == 503
    assert (await http.get("/stats")).json()["status"] == "failed"


async def test_while_the_engine_is_started_anew_requests_wait(http, engine):
    engine.pause_after = 2
    running = asyncio.create_task(http.post(COMPLETIONS, json=BODY))
    await under_way(engine)
    engine.state, engine.back_in_s = EngineState.RESTARTING, 2.5
    assert (await http.get("/health")).status_code == 200
    answer = await http.get("/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
    assert answer.headers["retry-after"] == "3"
    new = asyncio.create_task(http.post(COMPLETIONS, json=BODY))
    await under_way(engine, 2)
    assert (await http.get("/stats")).json()["status"] == "restarting"
    engine.state, engine.back_in_s, engine.pause_after = EngineState.READY, 0.0, None
    assert (await running).status_code == (await new).status_code == 200
    assert (await http.get("/ready")).status_code == 200


async def test_who_would_wait_too_long_for_the_engine_is_sent_away(http, engine):
    engine.state, engine.back_in_s = EngineState.RESTARTING, 89.2
    answer = await http.post(COMPLETIONS, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
    assert answer.headers["retry-after"] == "90"
    assert not engine.submissions


async def test_a_request_that_fails_while_the_engine_is_started_anew_learns_why(http, engine):
    engine.state, engine.fail_after = EngineState.RESTARTING, 2
    response = await http.post(COMPLETIONS, json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "out of memory"


async def test_an_engine_that_does_not_answer_is_no_health(http, engine):
    engine.pause_after = 2
    running = asyncio.create_task(http.post(COMPLETIONS, json=BODY))
    await under_way(engine)
    engine.state = EngineState.STALLED
    for answer in (await http.get("/health"), await http.get("/ready"), await http.post(COMPLETIONS, json=BODY)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stalled")
    engine.state, engine.pause_after = EngineState.READY, None
    assert (await running).status_code == 200
    assert (await http.get("/health")).status_code == 200


async def test_an_engine_that_ends_while_draining_is_no_death(http, engine, app):
    engine.pause_after = 2
    waiting = asyncio.create_task(http.post(COMPLETIONS, json=BODY))
    await under_way(engine)
    app.state.service.drain()
    engine.die()
    assert (await waiting).status_code == 503
    assert (await waiting).json()["error"]["code"] == "shutting_down"


async def test_before_the_model_is_loaded(engine, tokenizer):
    async with connect(create_app(None, ServerConfig())) as http:
        assert (await http.get("/health")).status_code == 200
        for answer in (await http.get("/ready"), await http.get("/v1/models"), await http.post(COMPLETIONS, json=BODY)):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_loading"
            assert int(answer.headers["retry-after"]) > 0
        stats = (await http.get("/stats")).json()
        assert (stats["status"], stats["model"]) == ("loading", None)
        assert (await http.get("/metrics")).status_code == 200


async def test_while_draining_running_requests_go_on(http, engine, app):
    engine.pause_after = 2
    running = asyncio.create_task(http.post(COMPLETIONS, json=BODY))
    await under_way(engine)
    app.state.service.drain()
    assert (await http.get("/health")).status_code == 200
    for answer in (await http.get("/ready"), await http.post(COMPLETIONS, json=BODY)):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
    engine.pause_after = None
    assert (await running).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_anything_could_be_sent_gives_its_place_back(app, engine, stream):
    engine.pause_after = 0
    received = iter(
        [
            {"type": "http.request", "body": json.dumps({**BODY, "stream": stream}).encode(), "more_body": False},
            {"type": "http.disconnect"},
        ]
    )

    async def receive():
        await asyncio.sleep(0)
        return next(received)

    async def send(message):
        await asyncio.Event().wait()  # an earlier answer that no client reads blocks the connection

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": COMPLETIONS}
    scope |= {"raw_path": COMPLETIONS.encode(), "query_string": b"", "root_path": "", "headers": headers}
    answering = asyncio.create_task(app(scope, receive, send))
    while app.state.service.models.num_unfinished == 0:
        await asyncio.sleep(0)
    await asyncio.wait((answering,), timeout=0.2)
    assert app.state.service.models.num_unfinished == 0
    answering.cancel()


async def test_draining_while_a_prompt_is_tokenized(http, engine, app, monkeypatch):
    service = app.state.service
    encode = service.loaded.encode

    def drain_and_encode(prompt):
        service.drain()
        return encode(prompt)

    monkeypatch.setattr(service.loaded, "encode", drain_and_encode)
    assert (await http.post(COMPLETIONS, json={**BODY, "echo": True})).status_code == 200
    assert service.models.num_unfinished == 0


async def test_what_is_cancelled_at_the_deadline_says_so(http, engine, app):
    engine.pause_after = 2
    waiting = asyncio.create_task(http.post(COMPLETIONS, json=BODY))
    streaming = asyncio.create_task(http.post(COMPLETIONS, json={**BODY, "stream": True}))
    await under_way(engine, 2)
    app.state.service.drain()
    engine.cancel_all = True
    assert (await waiting).status_code == 503
    assert (await waiting).json()["error"]["code"] == "shutting_down"
    _, error = read_broken_events((await streaming).text)
    assert error["code"] == "shutting_down"
