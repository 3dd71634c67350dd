"""`token_trees`: drafts in answers and streams of both endpoints, only for clients that ask for them."""

from __future__ import annotations

import json

import jsonschema_rs
import msgspec
import pytest

from moeflow.server.api.chat.chat_objects import ChatChunk, ChatResponse
from moeflow.server.api.completions.completion_objects import CompletionChunk, CompletionResponse
from moeflow.text.token_bytes import token_label
from tests.server.events import read_events
from tests.tiny_mixtral import EOS

pytestmark = pytest.mark.anyio

ENDPOINTS = [
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 100}, CompletionResponse, CompletionChunk),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}, ChatResponse, ChatChunk),
]
each_endpoint = pytest.mark.parametrize(("path", "body", "whole", "chunk"), ENDPOINTS)


@pytest.fixture
def drafting(engine):
    engine.model = msgspec.structs.replace(engine.model, speculators=("suffix", "draft"))
    engine.drafts_per_pass = 2
    return engine


def tokens(passes) -> list[int]:
    return [token["token_id"] for one in passes for token in one["tokens"]]


@each_endpoint
async def test_the_tokens_of_all_passes_are_the_answers(http, drafting, tokenizer, path, body, whole, chunk):
    response = await http.post(path, json={**body, "token_trees": True, "n": 2})
    answer = response.json()
    assert json.loads(whole.model_validate(answer, strict=True).model_dump_json()) == answer
    for choice in answer["choices"]:
        passes = choice["token_trees"]
        assert tokens(passes) == drafting.reply
        assert passes[0]["num_drafted"] == 4
        assert passes[0]["num_accepted"] == 2
        assert passes[0]["drafted"][3] == {
            "token_id": EOS + 1,
            "token": token_label(tokenizer.token_bytes(EOS + 1)),
            "parent": 0,
            "speculators": ["draft", "suffix"],
            "chance": 0.125,
            "is_accepted": False,
        }
        for one in passes:
            path_ids = [token["token_id"] for token in one["drafted"] if token["is_accepted"]]
            assert path_ids == [token["token_id"] for token in one["tokens"][: one["num_accepted"]]]
            for token in one["tokens"]:
                assert token["token"] == token_label(tokenizer.token_bytes(token["token_id"]))
    counted = sum(one["num_accepted"] for choice in answer["choices"] for one in choice["token_trees"])
    assert counted == answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]


@each_endpoint
async def test_a_stream_brings_each_pass_once(http, drafting, path, body, whole, chunk):
    response = await http.post(path, json={**body, "token_trees": True, "stream": True, "n": 2})
    events = read_events(response.text)
    for event in events:
        assert chunk.model_validate(event, strict=True, extra="forbid")
    for index in range(2):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        passes = [one for choice in choices for one in choice.get("token_trees", [])]
        assert tokens(passes) == drafting.reply


@each_endpoint
async def test_nobody_else_gets_any(http, drafting, path, body, whole, chunk):
    for wish in ({}, {"token_trees": False}, {"token_trees": None}):
        assert "token_trees" not in (await http.post(path, json={**body, **wish})).text
        assert "token_trees" not in (await http.post(path, json={**body, **wish, "stream": True})).text
    assert not any(one.sampling.token_trees for one in drafting.submissions)


@each_endpoint
async def test_a_server_that_does_not_draft_says_so(http, path, body, whole, chunk):
    response = await http.post(path, json={**body, "token_trees": True})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "token_trees"
    assert "--speculator" in error["message"]
    assert (await http.post(path, json={**body, "token_trees": False})).status_code == 200


@pytest.mark.parametrize("value", ["yes", 1, [], {"depth": 3}])
@each_endpoint
async def test_it_is_yes_or_no(http, drafting, path, body, whole, chunk, value):
    response = await http.post(path, json={**body, "token_trees": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "token_trees"


@pytest.mark.parametrize("speculators", [(), ("suffix",)])
async def test_the_document_says_whether_it_may_be_asked_for(http, engine, speculators):
    engine.model = msgspec.structs.replace(engine.model, speculators=speculators)
    document = (await http.get("/openapi.json")).json()
    for name in ("ChatRequest", "CompletionRequest"):
        schema = document["components"]["schemas"][name]["properties"]["token_trees"]
        check = jsonschema_rs.validator_for(schema)
        assert check.is_valid(True) == bool(speculators)
        assert check.is_valid(False)
        assert check.is_valid(None)
