from __future__ import annotations

import pytest

from tests.server.events import read_events
from tests.server.fake_client import NAME, REPLY

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def chat(http, **body):
    response = await http.post("/v1/chat/completions", json={"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(http, **body):
    response = await http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **body})
    assert response.status_code == 200, response.text
    return read_events(response.text)


async def test_a_whole_answer(http):
    answer = await chat(http)
    assert answer.pop("id").startswith("chatcmpl-")
    del answer["created"], answer["usage"]
    message = {"role": "assistant", "content": REPLY, "refusal": None}
    assert answer == {
        "object": "chat.completion",
        "model": NAME,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
    }


async def test_a_model_that_does_not_reason_keeps_to_any_limit_of_reasoning(http, engine):
    await chat(http, thinking_token_budget=5)
    assert not engine.submissions[-1].sampling.grammar


async def test_the_conversation_goes_through_the_models_template(http, engine, tokenizer):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "Bye", "name": "me"},
    ]
    await chat(http, messages=messages)
    prompt = tokenizer.decode(engine.submissions[0].prompt_token_ids)
    assert prompt == "<|system|>Be brief.<|user|>Hello<|assistant|>Hi<|user|>Bye<|assistant|>"


async def test_logprobs_have_bytes(http):
    answer = await chat(http, logprobs=True, top_logprobs=2, max_tokens=3)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    first, _, third = logprobs["content"]
    assert first == {
        "token": "G",
        "logprob": -1.5,
        "bytes": [71],
        "top_logprobs": [
            {"token": "F", "logprob": -0.25, "bytes": [70]},
            {"token": "G", "logprob": -1.5, "bytes": [71]},
        ],
    }
    assert third["bytes"] == [0xC3]
    assert third["token"] == "bytes:\\xc3"


async def test_streamed_logprobs_are_those_of_the_whole_answer(http):
    whole = await chat(http, logprobs=True, top_logprobs=1)
    chunks = await stream(http, logprobs=True, top_logprobs=1)
    given = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed = [token for logprobs in given if logprobs for token in logprobs["content"]]
    assert streamed == whole["choices"][0]["logprobs"]["content"]
    tokens_as_bytes = bytes(byte for token in streamed[:-1] for byte in token["bytes"])
    assert tokens_as_bytes.decode() == REPLY


async def test_without_a_limit_the_context_is_one(http, engine):
    await chat(http)
    assert engine.submissions[0].sampling.max_tokens is None


async def test_fields_that_change_nothing_are_taken(http):
    await chat(
        http,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        functions=None,
        prediction=None,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("web_search_options", {}),
    ],
)
async def test_what_would_change_the_answer_is_refused(http, engine, field, value):
    response = await http.post("/v1/chat/completions", json={"messages": HELLO, field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field} is not supported: ")
    assert not engine.submissions


@pytest.mark.parametrize(
    ("message", "param", "reason"),
    [
        (
            {"role": "wizard", "content": "x"},
            "messages[0].role",
            "'system', 'developer', 'user', 'assistant' or 'tool'",
        ),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id", "needs tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id", "no other has one"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls", "only an assistant's"),
        ({"role": "user"}, "messages[0].content", "Field required"),
        ({"role": "user", "content": 3}, "messages[0].content", "must be a string or a list of text parts"),
        ({"role": "user", "content": None}, "messages[0].content", "Field required"),
        ({"role": "user", "content": "x", "nam": "y"}, "messages[0].nam", "did you mean 'name'?"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls[0].id", "Field required"),
        ("Hello", "messages[0]", "valid dictionary"),
    ],
)
async def test_a_message_that_cannot_be_read(http, message, param, reason):
    response = await http.post("/v1/chat/completions", json={"messages": [message]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]


async def test_pictures_are_refused_by_name(http):
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    response = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    assert response.status_code == 400
    assert "image_url" in response.json()["error"]["message"]
    assert "text only" in response.json()["error"]["message"]
