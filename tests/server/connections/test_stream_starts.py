"""A stream whose answer cannot begin yet: it sends headers and heartbeats early, and an error in its own event."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time

import anthropic
import httpx
import openai
import pytest

from moeflow.core.errors import RequestError
from moeflow.server import sse
from moeflow.server.guard.large_bodies import LARGE_BYTES, MAX_LARGEST
from tests.server.events import read_typed_events
from tests.server.fake_client import NAME, REPLY
from tests.server.live_server import eventually, serve_in_thread

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
STREAMS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 100},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT | {"max_tokens": 100, "model": NAME},
}
HEARTBEATS = {": ping", "event: ping"}


class Held:
    """Prompts that are not tokenized before they are released, or held for so long; then they fail with `error`."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.hold_s = math.inf
        self.error: Exception | None = None
        self.num_begun = 0
        self.num_cancelled = 0

    async def wait(self) -> None:
        self.num_begun += 1
        end_s = time.monotonic() + self.hold_s
        try:
            while not self.released.is_set() and time.monotonic() < end_s:
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error


@pytest.fixture
def held(app, monkeypatch):
    """Hold all requests of the application, whose connections may be silent for 20 ms."""
    monkeypatch.setattr(sse, "PING_S", 0.02)
    held, generator = Held(), app.state.service.loaded

    def after(work):
        async def wait_and_work(*args, **kwargs):
            await held.wait()
            return await work(*args, **kwargs)

        return wait_and_work

    monkeypatch.setattr(generator, "encode", after(generator.encode))
    monkeypatch.setattr(generator, "encode_chat", after(generator.encode_chat))
    return held


def streamed(path: str) -> dict:
    return STREAMS[path] | {"stream": True}


@pytest.mark.parametrize("path", STREAMS)
def test_heartbeats_come_before_the_answer_can_begin(app, held, path):
    with serve_in_thread(app) as url, httpx.stream("POST", url + path, json=streamed(path)) as stream:
        lines, before = [], 0
        assert stream.status_code == 200
        for line in stream.iter_lines():
            lines.append(line)
            if not held.released.is_set() and sum(each in HEARTBEATS for each in lines) == 3:
                before = len(lines)
                held.released.set()
    assert {line for line in lines[:before] if line} - {'data: {"type":"ping"}'} <= HEARTBEATS
    assert "🦊" in "".join(lines)


@pytest.mark.anyio
@pytest.mark.parametrize("path", STREAMS)
async def test_an_error_before_the_headers_has_its_status(app, http, held, monkeypatch, path):
    monkeypatch.setattr(sse, "PING_S", 60.0)
    held.error = RequestError("too long", param="prompt")
    held.released.set()
    answer = await http.post(path, json=streamed(path))
    assert answer.status_code == 400
    assert "too long" in answer.json()["error"]["message"]
    assert app.state.service.models.num_unfinished == 0


def test_clients_read_an_error_after_the_headers_as_one(app, held):
    held.error, held.hold_s = RequestError("too long", param="prompt"), 0.1
    with serve_in_thread(app) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIError, match="too long") as of_chat:
                list(client.chat.completions.create(model=NAME, **CHAT, stream=True))
            assert of_chat.value.code == "invalid_value"
            (event,) = client.responses.create(model=NAME, input="Hi", stream=True)
            assert (event.type, event.code, event.message, event.param) == (
                "error",
                "invalid_value",
                "too long",
                "prompt",
            )
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError, match="too long") as of_messages:
                list(client.messages.create(model=NAME, max_tokens=20, **CHAT, stream=True))
            assert of_messages.value.body["error"]["type"] == "invalid_request_error"
        assert eventually(lambda: app.state.service.models.num_unfinished == 0)


@pytest.mark.anyio
async def test_an_error_after_the_headers_is_counted_and_logged(app, http, held, caplog):
    held.error = RequestError("too long", param="prompt")
    held.hold_s = 0.1
    with caplog.at_level("WARNING", logger="moeflow.server.request_log"):
        answer = await http.post("/v1/responses", json=streamed("/v1/responses"))
    assert answer.status_code == 200
    (event,) = read_typed_events(answer.text.replace(": ping\n\n", ""))
    assert event["type"] == "error"
    (line,) = [record.fields for record in caplog.records]
    assert (line["status"], line["end"], line["error"]) == (200, "invalid_value", "too long")
    assert 'invalid_value"} 1.0' in (await http.get("/metrics")).text


def test_a_client_that_leaves_before_the_answer_begins_ends_the_start(app, engine, held):
    with serve_in_thread(app) as url, httpx.stream("POST", f"{url}/v1/responses", json=streamed("/v1/responses")) as it:
        assert next(it.iter_lines()) == ": ping"
        it.close()
        assert eventually(lambda: held.num_cancelled == held.num_begun == 1)
        assert eventually(lambda: app.state.service.models.num_unfinished == 0)
    assert not engine.submissions


@pytest.mark.anyio
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_leaves_as_the_headers_go_out_ends_the_start(app, engine, held, has_begun):
    """The events are not asked for then: neither by the start nor by its generation."""
    if has_begun:
        held.released.set()
    head = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope = head | {"headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]}
    body = json.dumps(streamed("/v1/completions")).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        assert message["type"] == "http.response.start"
        await asyncio.Event().wait()

    await app(scope, receive, send)
    await asyncio.sleep(0.01)
    assert held.num_begun == 1
    assert held.num_cancelled == (not has_begun)
    assert app.state.service.models.num_unfinished == 0
    assert not engine.submissions


@pytest.mark.anyio
async def test_a_large_body_is_counted_until_the_answer_has_begun(app, http, held):
    large, limit = app.state.service.large_bodies, app.state.service.config.max_body_bytes
    body = streamed("/v1/completions") | {"prompt": "x" * (LARGE_BYTES + 1)}
    large.reserve(MAX_LARGEST * limit - len(json.dumps(body)) - 100)
    first = asyncio.create_task(http.post("/v1/completions", json=body))
    await asyncio.sleep(0.2)
    assert held.num_begun == 1
    assert (await http.post("/v1/completions", json=body)).status_code == 429
    held.released.set()
    await first
    large.reserve(len(json.dumps(body)) + 100)  # all of it is there again


@pytest.mark.anyio
async def test_an_answer_that_is_not_streamed_waits_for_its_start(http, held):
    held.hold_s = 0.1
    answer = await http.post("/v1/completions", json=STREAMS["/v1/completions"])
    assert answer.json()["choices"][0]["text"] == REPLY
