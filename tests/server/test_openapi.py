"""The document is correct: every model it names exists, and answers fit the models it names."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from moeflow.engine.generator import Generator
from moeflow.server.api.chat.chat_objects import ChatChunk, ChatRequest, ChatResponse
from moeflow.server.api.completions.completion_objects import CompletionChunk, CompletionRequest, CompletionResponse
from moeflow.server.api.messages.message_request import MessageRequest
from moeflow.server.api.ollama.chat_request import OllamaChatRequest
from moeflow.server.api.ollama.embed_request import OllamaEmbedRequest
from moeflow.server.api.ollama.generate_request import OllamaGenerateRequest
from moeflow.server.api.ollama.options import OllamaOptions
from moeflow.server.api.responses.response_request import ResponseRequest
from moeflow.server.api.schema.model_limits import pattern_below
from moeflow.server.api.tokenize import TokenizeRequest
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.server.conftest import connect
from tests.server.events import read_events
from tests.server.fake_client import FakeClient
from tests.shapes import INFO


def references(document: object) -> set[str]:
    if isinstance(document, dict):
        here = {document["$ref"]} if isinstance(document.get("$ref"), str) else set()
        return here.union(*map(references, document.values()))
    return set().union(*map(references, document)) if isinstance(document, list) else set()


@pytest.fixture(scope="module")
def document(tokenizer):
    """The document of one application, made once: this takes a second."""
    return create_app(Generator(FakeClient(tokenizer), tokenizer), ServerConfig()).openapi()


def test_every_reference_leads_somewhere(document):
    found = references(document)
    assert "#/components/schemas/ChatChunk" in found
    for reference in found:
        target = document
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]


def test_every_endpoint_names_its_answer_and_its_errors(document):
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert set(operation["responses"]) == {"200", "4XX", "5XX"}, path
            for content in operation["responses"]["200"]["content"].values():
                assert content.get("schema") or content.get("itemSchema") or path == "/metrics", path


def test_request_models_name_every_field_and_no_other(document):
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["additionalProperties"] == {"type": "null"}
    assert {"messages", "temperature", "top_k", "stream_options"} <= set(schema["properties"])
    assert schema["required"] == ["messages"]


@pytest.mark.parametrize("model", ["ChatRequest", "MessageRequest", "ResponseRequest"])
def test_the_document_states_that_names_of_tools_differ(document, model):
    """JSON schema cannot demand that one property of all items differs."""
    assert "differ" in document["components"]["schemas"][model]["properties"]["tools"]["description"]


@pytest.mark.parametrize(
    ("path", "body", "whole", "chunk"),
    [
        ("/v1/completions", {"prompt": "Hi", "logprobs": 2, "echo": True}, CompletionResponse, CompletionChunk),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1},
            ChatResponse,
            ChatChunk,
        ),
    ],
)
@pytest.mark.anyio
async def test_chunks_fit_their_models(http, path, body, whole, chunk):
    answer = (await http.post(path, json=body)).json()
    assert json.loads(whole.model_validate(answer, strict=True).model_dump_json()) == answer
    response = await http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    for event in read_events(response.text):
        assert chunk.model_validate(event, strict=True, extra="forbid")


SOME = st.sampled_from([None, True, False, 0, 1, 2, 1.5, "", "a", [], ["a"], [3], {}])
MESSAGES = [{"role": "user", "content": "Hi"}]


ITEMS = [
    {},
    {"role": "user"},
    {"role": "user", "content": "x"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": None, "role": "user", "content": "x"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}, {"type": "x"}]},
    {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"},
    {"type": "function_call", "call_id": "a", "name": "b"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}], "summary": []},
    {"type": "reasoning", "role": "user"},
    {"type": "item_reference", "id": "x"},
    "x",
    3,
]
TURNS = [
    {"role": "user", "content": "x"},
    {"role": "user", "content": []},
    {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [], "is_error": True}]},
    {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": []}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}]},
    {"role": "system", "content": [{"type": "text", "text": "x"}]},
    {"role": "system", "content": [{"type": "thinking", "thinking": "x"}]},
    {"role": "tool", "content": "x"},
    {"content": "x"},
    "x",
]
CHOICES = [
    {"tool_choice": choice, "tools": tools}
    for choice in (None, "auto", {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "a"}, {"type": "x"}, {})
    for tools in (None, [], [{"name": "a", "input_schema": {}}], [{"name": "a"}])
]


@pytest.mark.parametrize(
    ("model", "field", "values", "others"),
    [
        (ResponseRequest, "input", ITEMS, [{}]),
        (MessageRequest, "messages", TURNS, [{"max_tokens": 5}]),
        (MessageRequest, "messages", TURNS[:1], [{"max_tokens": 5, **choice} for choice in CHOICES]),
    ],
    ids=["items", "messages", "choices"],
)
def test_the_document_allows_the_parts_that_the_server_takes(model, field, values, others):
    schema = jsonschema_rs.validator_for(model.model_json_schema())
    seen = set()
    for value in values:
        for other in others:
            body = {field: [value], **other}
            try:
                model.model_validate(body)
                is_taken = True
            except ValidationError:
                is_taken = False
            seen.add(is_taken)
            assert schema.is_valid(body) is is_taken, body
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("model", "required", "names"),
    [
        (CompletionRequest, {"prompt": "Hi"}, ("stream", "stream_options", "echo", "logprobs", "n", "best_of", "stop")),
        (
            ChatRequest,
            {"messages": MESSAGES},
            ("stream", "stream_options", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens"),
        ),
        (
            ResponseRequest,
            {"input": "Hi"},
            ("stream", "stream_options", "tools", "tool_choice", "max_output_tokens", "text", "reasoning", "input"),
        ),
        (
            MessageRequest,
            {"messages": MESSAGES, "max_tokens": 5},
            ("stream", "tools", "tool_choice", "max_tokens", "system", "thinking", "output_config", "stop_sequences"),
        ),
        (
            TokenizeRequest,
            {},
            ("prompt", "messages", "add_special_tokens", "continue_final_message", "model"),
        ),
        (OllamaChatRequest, {}, ("messages", "stream", "tools", "format", "think", "options", "keep_alive")),
        (OllamaGenerateRequest, {}, ("prompt", "raw", "system", "context", "format", "think", "keep_alive")),
        (OllamaEmbedRequest, {"input": "Hi"}, ("input", "truncate", "dimensions", "options", "keep_alive")),
        (
            OllamaOptions,
            {},
            (
                "repeat_last_n",
                "repeat_penalty",
                "presence_penalty",
                "num_predict",
                "seed",
                "num_ctx",
                "num_gpu",
                "stop",
            ),
        ),
    ],
    ids=[
        *("completions", "chat", "responses", "messages", "tokenize"),
        *("ollama-chat", "ollama-generate", "ollama-embed", "ollama-options"),
    ],
)
def test_the_document_allows_what_the_server_takes_and_nothing_else(model, required, names):
    """Also rules about combinations of fields: another implementation of JSON Schema is the judge."""
    schema = jsonschema_rs.validator_for(model.model_json_schema())
    seen = set()

    @settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(st.fixed_dictionaries({}, optional=dict.fromkeys(names, SOME)))
    def compare(fields):
        body = {**required, **fields}
        if body.get("messages") == ["a"]:  # not of the kind that the test is about
            body["messages"] = MESSAGES
        try:
            model.model_validate(body)
            is_taken = True
        except ValidationError:
            is_taken = False
        seen.add(is_taken)
        assert schema.is_valid(body) is is_taken, body

    compare()
    assert seen == {True, False}


@pytest.mark.anyio
async def test_a_loaded_models_limits_are_in_the_document(make_app):
    """The fake engine's model has 258 token ids and computes 4 sequences at once."""
    async with connect(make_app(max_queue=3)) as http:
        document = (await http.get("/openapi.json")).json()
        schemas = document["components"]["schemas"]
        assert schemas["DetokenizeRequest"]["properties"]["tokens"]["items"]["exclusiveMaximum"] == 258
        body = schemas["CompletionRequest"]["properties"]
        text, ids, texts, lists = body["prompt"]["anyOf"]
        assert (text["minLength"], ids["items"]["exclusiveMaximum"], texts["maxItems"], lists["maxItems"]) == (
            1,
            258,
            7,
            7,
        )
        assert body["n"]["anyOf"][0]["maximum"] == 7
        dimensions, _ = schemas["EmbeddingRequest"]["properties"]["dimensions"]["anyOf"]
        assert (dimensions["minimum"], dimensions["maximum"]) == (1, INFO.hidden_size)
        assert list(body["logit_bias"]["anyOf"][0]["patternProperties"]) == [pattern_below(258)]
        for name, value, status in (
            ("n", 7, 200),
            ("n", 8, 400),
            ("logit_bias", {"257": 1}, 200),
            ("logit_bias", {"258": 1}, 400),
        ):
            answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, name: value})
            assert answer.status_code == status, name
        assert "x-model-limit" not in json.dumps(document)


@pytest.mark.anyio
async def test_before_a_model_is_loaded_its_limits_are_not_in_the_document():
    async with connect(create_app(None, ServerConfig())) as http:
        document = (await http.get("/openapi.json")).json()
    assert (
        document["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]["items"]["exclusiveMaximum"]
        == 2**31
    )
    assert "x-model-limit" not in json.dumps(document)


@pytest.mark.parametrize("limit", [1, 2, 9, 10, 11, 99, 100, 101, 258, 1000, 32000, 49152])
def test_the_pattern_of_token_ids_is_exact(limit):
    pattern = re.compile(pattern_below(limit))
    assert [number for number in range(2 * limit + 200) if pattern.search(str(number))] == list(range(limit))
    assert not any(map(pattern.search, ("00", "01", "", "-1", "1.0", "a1")))
