"""Any JSON, and any mutation of sensible JSON, gets an answer or a reason: never a 5xx, never a leak."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeflow.engine.generator import Generator
from moeflow.server.api.chat.chat_objects import ChatRequest
from moeflow.server.api.completions.completion_objects import CompletionRequest
from moeflow.server.api.messages.message_request import MessageRequest
from moeflow.server.api.ollama.chat_request import OllamaChatRequest
from moeflow.server.api.ollama.generate_request import OllamaGenerateRequest
from moeflow.server.api.responses.response_request import ResponseRequest
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.server.conftest import connect
from tests.server.fake_client import FakeClient

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=4), max_leaves=8
)
NEAR = (
    st.integers(-2, 300)
    | st.floats(-2, 2)
    | st.booleans()
    | st.none()
    | st.sampled_from(["", "x", "Hello", 10**20, 1e300, [], {}, [""], ["a", "b"], [3, 4], [[3], [4]], {"5": 1}])
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": st.text(max_size=9) | NEAR}
    ),
    max_size=3,
)


def bodies(model: type, required: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    """Requests with known fields and values that are often nearly right."""
    optional = {name: NEAR | JSON for name in [*model.model_fields, *model.policies]}
    return st.fixed_dictionaries(required, optional={k: v for k, v in optional.items() if k not in required})


MODELS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessageRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
}
COMPLETIONS = bodies(CompletionRequest, {"prompt": NEAR | st.text(max_size=9), "model": st.none()})
CHATS = bodies(ChatRequest, {"messages": MESSAGES, "model": st.none()})
ANSWERS = bodies(MessageRequest, {"messages": MESSAGES, "max_tokens": st.integers(0, 9), "model": st.none()})
RESPONSES = bodies(ResponseRequest, {"input": NEAR | st.text(max_size=9) | MESSAGES, "model": st.none()})
OLLAMA_CHATS = bodies(OllamaChatRequest, {"messages": MESSAGES, "model": st.none()})
GENERATIONS = bodies(OllamaGenerateRequest, {"prompt": NEAR | st.text(max_size=9), "model": st.none()})
REQUESTS = st.one_of(
    st.tuples(st.just("/api/chat"), OLLAMA_CHATS),
    st.tuples(st.just("/api/generate"), GENERATIONS),
    st.tuples(st.just("/v1/responses"), RESPONSES),
    st.tuples(st.just("/v1/messages"), ANSWERS),
    st.tuples(st.just("/v1/completions"), COMPLETIONS),
    st.tuples(st.just("/v1/chat/completions"), CHATS),
    st.tuples(st.sampled_from([*MODELS, "/tokenize", "/detokenize"]), JSON),
)


def one_changed(path: str, body: dict[str, object]) -> st.SearchStrategy:
    """A request that works, but for one or two fields."""
    model = MODELS[path]
    names = st.sampled_from(sorted({*model.model_fields, *model.policies}))
    return st.dictionaries(names, NEAR | JSON, min_size=1, max_size=2).map(lambda changes: (path, body | changes))


CHANGED = (
    one_changed("/v1/completions", {"prompt": "Hi", "max_tokens": 5})
    | one_changed("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5})
    | one_changed("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5})
    | one_changed("/v1/responses", {"input": "Hi", "max_output_tokens": 5})
    | one_changed("/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 5}})
    | one_changed("/api/generate", {"prompt": "Hi", "options": {"num_predict": 5}})
)


@pytest.mark.slow
@pytest.mark.parametrize("requests", [REQUESTS, CHANGED], ids=["anything", "nearly right"])
def test_no_body_breaks_the_server(tokenizer, requests):
    engine = FakeClient(tokenizer)
    app = create_app(Generator(engine, tokenizer), ServerConfig())
    statuses = set()

    async def post(path: str, body: bytes):
        async with connect(app) as http:
            return await http.post(path, content=body, headers={"content-type": "application/json"})

    @settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
    @given(requests)
    def run(request):
        path, body = request
        response = asyncio.run(post(path, json.dumps(body).encode()))
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200 and path.startswith("/api/"):
            assert isinstance(response.json()["error"], str)
        elif response.status_code != 200:
            is_anthropic = path == "/v1/messages"
            fields = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
            further = {"details"} if is_anthropic else {"n_prompt_tokens", "n_ctx"}
            assert set(response.json()["error"]) - further == fields
        assert app.state.service.models.num_unfinished == 0
        assert not engine.live

    run()
    assert 400 in statuses


@given(st.binary(max_size=50))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_break_the_server(app, body):
    async def post():
        async with connect(app) as http:
            return await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})

    assert asyncio.run(post()).status_code == 400


@pytest.mark.slow
def test_the_server_does_what_its_document_says(monkeypatch, capfd):
    """A short run of what `scripts/fuzz-api` does for long: schemathesis with every check and no filter."""
    script = str(Path(__file__).parents[2] / "scripts" / "fuzz_api.py")
    monkeypatch.setattr(sys, "argv", [script, "--max-examples", "2", "--max-time", "4", "--seed", "1"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    output, errors = capfd.readouterr()
    assert ended.value.code == 0, output[-10_000:] + errors[-5_000:]
    assert "No issues found" in output
