"""A prompt that the context cannot hold: each API's error is one that its clients know, and shorten the prompt for.

The patterns are those of the clients' public sources.
"""

from __future__ import annotations

import re

import pytest

from tests.server.events import read_typed_events

pytestmark = pytest.mark.anyio

LONG = "x" * 300  # tokens, in a context of 256
MESSAGES = [{"role": "user", "content": LONG}]
OPENAI = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/embeddings": {"input": LONG},
}
ANTHROPIC = {"messages": MESSAGES, "max_tokens": 10}
OPENAI_PATTERNS = {
    "OpenCode and pi: by the words of OpenRouter": r"(?i)maximum context length is \d+ tokens",
    "OpenCode and pi: by the words of Groq": r"(?i)reduce the length of the messages",
    "OpenCode: by the code": r"(?i)context[_ ]length[_ ]exceeded",
    "Cline and Roo Code: by the words of OpenRouter, with status 400": r"(?i)\bmaximum\s*context\b",
    "Cline and Roo Code: by the words of Cerebras": r"Please reduce the length of the messages or completion",
    "LiteLLM, and aider by it": r"This model's maximum context length is",
    "agents that read the numbers": r"(?i)maximum context length is (\d+) tokens?\.?\s*however,\s*you requested (\d+) "
    r"tokens? \((\d+) in the (?:messages|prompt), (\d+) in the completion\)",
    "clients of llama.cpp that read the context": r'"n_ctx"\s*:\s*256\b',
    "clients of llama.cpp that read the prompt": r'"n_prompt_tokens"\s*:\s*\d+',
}
ANTHROPIC_PATTERNS = {
    "Claude Code, OpenCode and pi": r"(?i)prompt is too long",
    "Cline and Roo Code, by Vercel's SDK": r"(?i)prompt is too long.*tokens?\s*>\s*\d+\s*maximum",
    "programs around Claude Code that read the numbers": r"prompt is too long: (\d+) tokens? > (\d+) maximum",
}


@pytest.mark.parametrize("path", OPENAI)
async def test_openais_clients_recognize_it(http, path):
    response = await http.post(path, json=OPENAI[path])
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    missed = [client for client, pattern in OPENAI_PATTERNS.items() if not re.search(pattern, response.text)]
    assert not missed


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_anthropics_clients_recognize_it(http, is_streamed):
    response = await http.post("/v1/messages", json={**ANTHROPIC, "stream": is_streamed})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    missed = [client for client, pattern in ANTHROPIC_PATTERNS.items() if not re.search(pattern, error["message"])]
    assert not missed
    assert error["message"].startswith("prompt is too long")


@pytest.mark.parametrize("num_chars", [255, 256, 300])
async def test_the_numbers_are_true(http, num_chars):
    """A byte is a token, so one more fits behind a prompt of 255."""
    response = await http.post("/v1/completions", json={"prompt": "x" * num_chars, "max_tokens": 5})
    if num_chars < 256:
        assert response.status_code == 200
        return
    error = response.json()["error"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (num_chars, 256)
    assert f"you requested {num_chars + 1} tokens ({num_chars} in the prompt, 1 in the completion)" in error["message"]
    counted = await http.post("/v1/messages/count_tokens", json={"messages": MESSAGES})
    refused = (await http.post("/v1/messages", json=ANTHROPIC)).json()["error"]["message"]
    assert refused == f"prompt is too long: {counted.json()['input_tokens']} tokens > 255 maximum"


async def test_a_stream_of_a_response_fails_by_an_event(http, app):
    """Codex shortens the conversation where `response.failed` has this code; status 400 ends its work."""
    response = await http.post("/v1/responses", json={"input": LONG, "stream": True, "temperature": 0.5})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = read_typed_events(response.text)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 256 tokens" in failed["error"]["message"]
    assert failed["temperature"] == 0.5
    assert app.state.service.models.num_unfinished == 0


async def test_other_errors_have_no_numbers(http):
    error = (await http.post("/v1/completions", json={"prompt": ""})).json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
