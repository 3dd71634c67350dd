"""Each stream keeps its connection busy while nothing comes, and clients read past that."""

from __future__ import annotations

import anthropic
import httpx
import openai
import pytest

from moeflow.server import sse
from tests.server.live_server import eventually, serve_in_thread

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
STREAMS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT | {"max_tokens": 20, "model": "fake-model"},
}
HEARTBEATS = {": ping", "event: ping"}


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_waits_for_its_first_token_is_never_silent(app, engine, monkeypatch, path):
    monkeypatch.setattr(sse, "PING_S", 0.02)
    engine.pause_after = 0  # as in the queue, or while a long prompt is computed
    with serve_in_thread(app) as url, httpx.stream("POST", url + path, json=STREAMS[path] | {"stream": True}) as stream:
        num_heartbeats = 0
        for line in stream.iter_lines():
            num_heartbeats += line in HEARTBEATS
            if num_heartbeats == 5:
                engine.pause_after = None
        assert num_heartbeats >= 5
        assert engine.submissions
        assert not engine.live


def test_clients_read_past_heartbeats(app, engine, monkeypatch):
    with serve_in_thread(app) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            whole = client.chat.completions.create(model="fake-model", **CHAT).choices[0].message.content
            monkeypatch.setattr(sse, "PING_S", 0.0)
            chunks = client.chat.completions.create(model="fake-model", **CHAT, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
            events = client.responses.create(model="fake-model", input="Hi", stream=True)
            assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
        with (
            anthropic.Anthropic(base_url=url, api_key="none") as client,
            client.messages.stream(model="fake-model", max_tokens=200, **CHAT) as stream,
        ):
            assert "".join(stream.text_stream) == whole
        assert eventually(lambda: not engine.live)
