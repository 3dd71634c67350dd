"""The document says what is true: every model it names is there, and answers fit the models it names."""

from __future__ import annotations

import json

import pytest

from moeflow.server.api.chat_schema import ChatChunk, ChatResponse
from moeflow.server.api.completion_schema import CompletionChunk, CompletionResponse
from tests.server.events import read_events

pytestmark = pytest.mark.anyio


def references(document: object) -> set[str]:
    if isinstance(document, dict):
        here = {document["$ref"]} if isinstance(document.get("$ref"), str) else set()
        return here.union(*map(references, document.values()))
    return set().union(*map(references, document)) if isinstance(document, list) else set()


async def test_every_reference_leads_somewhere(http):
    document = (await http.get("/openapi.json")).json()
    found = references(document)
    assert "#/components/schemas/ChatChunk" in found
    for reference in found:
        target = document
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]


async def test_every_endpoint_names_its_answer_and_its_errors(http):
    document = (await http.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert set(operation["responses"]) == {"200", "4XX", "5XX"}, path
            for content in operation["responses"]["200"]["content"].values():
                assert content.get("schema") or path == "/metrics", path


async def test_request_models_name_every_field_and_no_other(http):
    document = (await http.get("/openapi.json")).json()
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["additionalProperties"] is False
    assert {"messages", "temperature", "top_k", "stream_options"} <= set(schema["properties"])
    assert schema["required"] == ["messages"]


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
async def test_chunks_fit_their_models(http, path, body, whole, chunk):
    answer = (await http.post(path, json=body)).json()
    assert json.loads(whole.model_validate(answer, strict=True).model_dump_json()) == answer
    response = await http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    for event in read_events(response.text):
        assert chunk.model_validate(event, strict=True, extra="forbid")
