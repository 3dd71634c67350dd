"""`/api/chat`, as Ollama's client uses it: lines and whole answers, calls, thinking, forms, errors in its words."""

from __future__ import annotations

import asyncio
from itertools import islice

import httpx
import ollama
import pytest
from hypothesis import HealthCheck, given, settings

from moeflow.server import sse
from moeflow.server.api.ollama.answer_objects import OllamaChatResponse
from moeflow.server.api.ollama.chat_request import OllamaChatRequest
from tests.server.conftest import connect
from tests.server.conversing import ONE, check_closing_ends_the_work, prompt_of, texts_of
from tests.server.fake_client import NAME, REPLY
from tests.server.live_server import eventually
from tests.server.ollama.asking import ASK, TOOLS, asked, joined, lines_of, without_times
from tests.server.test_tools import TWO, says

CALLS = [("look", {"q": "the fox"}), ("go", {})]


def called(message) -> list[tuple[str, dict]]:
    return [(call["function"]["name"], dict(call["function"]["arguments"])) for call in message["tool_calls"]]


def test_a_text(client, engine):
    answer = client.chat(NAME, ASK)
    assert (answer.message.role, answer.message.content, answer.message.tool_calls) == ("assistant", REPLY, None)
    assert (answer.model, answer.done, answer.done_reason) == (NAME, True, "stop")
    assert answer.prompt_eval_count == len(engine.submissions[0].prompt_token_ids)
    assert answer.eval_count == len(REPLY.encode()) + 1
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 1
    assert "".join(part.message.content for part in client.chat(NAME, ASK, stream=True)) == REPLY


@pytest.mark.anyio
async def test_lines_are_the_default_and_say_the_same_as_the_whole_answer(http):
    response = await http.post("/api/chat", json=asked())
    lines = lines_of(response)
    for line in lines:
        OllamaChatResponse.model_validate(line, strict=True, extra="forbid")
    assert [line["message"]["content"] for line in lines] == [*REPLY, ""]
    whole = await http.post("/api/chat", json=asked(stream=False))
    assert whole.headers["content-type"] == "application/json"
    assert without_times(joined(lines)) == without_times(whole.json())


@pytest.mark.anyio
async def test_it_continues_an_answer_at_the_end(http, engine):
    messages = [*ASK, {"role": "assistant", "content": "The fox is"}]
    assert (await http.post("/api/chat", json=asked(messages=messages))).status_code == 200
    body = {"messages": messages, "continue_final_message": True}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    first, second = [submission.prompt_token_ids for submission in engine.submissions]
    assert first == second


@pytest.mark.anyio
async def test_it_asks_the_model_the_same_as_the_other_apis(http, engine):
    """Calls without ids, and their results in order, are the conversation that OpenAI's clients write with ids."""
    call = {"id": "000001000", "type": "function", "function": {"name": "look", "arguments": '{"q": "ü"}'}}
    second = {"id": "000001001", "type": "function", "function": {"name": "go", "arguments": "{}"}}
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [call, second], "reasoning_content": "Hm."},
        {"role": "tool", "content": "went", "tool_call_id": second["id"]},
        {"role": "tool", "content": "found", "tool_call_id": call["id"]},
        {"role": "user", "content": "So?"},
    ]
    plain = {
        "model": NAME,
        "messages": conversation,
        "tools": TOOLS,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.125,
        "seed": 3,
        "stop": ["zz"],
        "max_tokens": 9,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    assert (await http.post("/v1/chat/completions", json=plain)).status_code == 200
    calls = [{"function": {"name": "look", "arguments": {"q": "ü"}}}, {"function": {"name": "go", "arguments": {}}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "tool_calls": calls, "thinking": "Hm."},
        {"role": "tool", "content": "went", "tool_name": "go"},
        {"role": "tool", "content": "found"},
        {"role": "user", "content": "So?"},
    ]
    options = {
        **{name: plain[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
        **{name: plain[name] for name in ("presence_penalty", "frequency_penalty")},
        **{"repeat_penalty": 1.5, "num_predict": 9, "repeat_last_n": -1, "num_ctx": 10**6, "num_gpu": -1},
        **{"num_thread": 4, "use_mmap": True, "numa": False, "mirostat": 0, "tfs_z": 1.0, "typical_p": 1.0},
    }
    body = {"model": f"{NAME}:latest", "messages": messages, "tools": TOOLS, "options": options, "keep_alive": "5m"}
    assert (await http.post("/api/chat", json={**body, "stream": False})).status_code == 200
    openai, ours = engine.submissions
    assert ours.prompt_token_ids == openai.prompt_token_ids
    assert ours.sampling == openai.sampling


def test_earlier_thinking_is_the_templates_to_use():
    asked_of = OllamaChatRequest(messages=[{"role": "assistant", "content": "x", "thinking": "Hm."}]).conversation()
    assert asked_of.messages == [{"role": "assistant", "content": "x", "reasoning_content": "Hm."}]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"max_tokens": None, "seed": None}),
        ({"num_predict": -1, "seed": -1}, {"max_tokens": None, "seed": None}),
        ({"num_predict": -2, "top_k": 0}, {"max_tokens": None, "top_k": 0}),
        ({"num_predict": 3.0}, {"max_tokens": 3}),
        (
            {"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 1.0},
            {"repetition_penalty": 1.0, "presence_penalty": 0.0},
        ),
        ({"repeat_last_n": 64, "repeat_penalty": 1.0}, {"repetition_penalty": 1.0}),
    ],
)
async def test_options(http, engine, options, expected):
    assert (await http.post("/api/chat", json=asked(options=options))).status_code == 200
    sampling = engine.submissions[0].sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


def test_an_answer_at_its_limit(client):
    answer = client.chat(NAME, ASK, options={"num_predict": 3})
    assert (answer.done_reason, answer.eval_count) == ("length", 3)


def test_calls(client, engine, tokenizer):
    says(engine, tokenizer, TWO)
    answer = client.chat(NAME, ASK, tools=TOOLS)
    assert (answer.message.content.strip(), answer.done_reason) == ("Let me see.", "stop")
    assert called(answer.message) == CALLS
    parts = [part.message for part in client.chat(NAME, ASK, tools=TOOLS, stream=True)]
    assert [called(part) for part in parts if part.tool_calls] == [[call] for call in CALLS]
    assert "".join(part.content for part in parts) == answer.message.content


def test_a_python_function_as_a_tool_and_its_result(client, engine, tokenizer):
    def look(q: str) -> str:
        """Looks it up.

        Args:
          q: The question.
        """
        return f"No {q}."

    says(engine, tokenizer, ONE)
    answer = client.chat(NAME, ASK, tools=[look])
    (call,) = answer.message.tool_calls
    result = {"role": "tool", "content": look(**call.function.arguments), "tool_name": call.function.name}
    client.chat(NAME, [*ASK, answer.message, result], tools=[look])
    assert "No the fox." in prompt_of(engine, tokenizer)


def test_a_call_that_breaks_off(client, engine, tokenizer):
    """Arguments are an object, so an incomplete one has its certain part."""
    says(engine, tokenizer, '<tool_call>\n{"name": "look", "arguments": {"q": "1", "r": [2')
    assert called(client.chat(NAME, ASK, tools=TOOLS).message) == [("look", {"q": "1", "r": []})]


def test_thinking(thinking):
    client, engine, tokenizer = thinking
    says(engine, tokenizer, "<think>\nHm.\n</think>\n\nYes.")
    answer = client.chat(NAME, ASK)
    assert (answer.message.thinking, answer.message.content) == ("Hm.", "Yes.")
    parts = [part.message for part in client.chat(NAME, ASK, stream=True)]
    assert "".join(part.thinking or "" for part in parts) == "Hm."
    assert "".join(part.content for part in parts) == "Yes."


@pytest.mark.parametrize(
    ("think", "expected"),
    [(None, "user:Which fox?"), (True, "user:Which fox?"), ("low", "user:Which fox?low"), (False, "<think></think>")],
)
def test_how_much_it_thinks_is_the_templates_to_know(thinking, think, expected):
    client, engine, tokenizer = thinking
    client.chat(NAME, ASK, think=think)
    prompt = tokenizer.decode(engine.submissions[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith(expected)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("form", "response_format"),
    [
        ("json", {"type": "json_object"}),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            },
        ),
        ("", None),
    ],
)
async def test_a_form_is_the_same_as_a_response_format(http, engine, form, response_format):
    await http.post("/api/chat", json=asked(format=form))
    await http.post("/v1/chat/completions", json=asked(response_format=response_format))
    ours, openai = engine.submissions
    assert ours.sampling.grammar == openai.sampling.grammar
    assert bool(ours.sampling.grammar) == bool(form)


@pytest.mark.anyio
async def test_log_probabilities(http):
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = (await http.post("/api/chat", json=asked(stream=False, **fields))).json()["logprobs"]
    openai = (await http.post("/v1/chat/completions", json=asked(**fields))).json()
    assert whole == openai["choices"][0]["logprobs"]["content"]
    lines = lines_of(await http.post("/api/chat", json=asked(**fields)))
    assert [token for line in lines for token in line.get("logprobs", ())] == whole


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": ASK}),
        ("/api/generate", {"prompt": "x"}),
        ("/api/embed", {"input": "x"}),
        ("/v1/chat/completions", {"messages": ASK}),
    ],
)
async def test_options_of_the_machine_need_the_types_that_ollama_demands(http, path, body):
    """Ollama's `Options.FromMap` takes any number for an integer, skips null, and refuses other types."""
    numbers = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "draft_num_predict")
    wrong = [(name, value) for name in numbers for value in ("4", True, [4], {"x": 4})]
    wrong += [("use_mmap", value) for value in ("true", 1, [True])]
    for name, value in wrong:
        answer = await http.post(path, json={**body, "options": {name: value}})
        assert answer.status_code == 400, (name, value)
        assert name in answer.text
    right = {**dict.fromkeys(numbers, 4), "num_thread": 4.5, "main_gpu": None, "num_gpu": -1, "use_mmap": False}
    assert (await http.post(path, json={**body, "options": right})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"model": "zz"}, 404, "model 'zz' not found; this server has 'fake-model'"),
        ({"messages": [{"role": "user", "content": "x", "images": ["iVBORw0KGgo="]}]}, 400, "images is not supported"),
        ({"options": {"mirostat": 2}}, 400, "mirostat is not supported"),
        ({"options": {"typical_p": 0.5}}, 400, "typical_p is not supported"),
        ({"options": {"tfs_z": 2.0}}, 400, "tfs_z is not supported"),
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.5}}, 400, "repeat_last_n is not supported"),
        ({"options": {"temprature": 0.5}}, 400, "temperature"),
        ({"options": {"temperature": 3.0}}, 400, "options.temperature"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "maximum context length is 256 tokens"),
        ({"format": {"type": "zz"}}, 400, "format"),
    ],
)
def test_refusals(refusing, stream, changes, status, reason):
    client, engine = refusing
    with pytest.raises(ollama.ResponseError) as caught:
        list(client.chat(**asked(stream=stream, **changes)))
    assert caught.value.status_code == status
    assert reason in caught.value.error
    assert not engine.submissions


def test_a_stream_that_fails(client, engine):
    engine.fail_after = 2
    parts = client.chat(NAME, ASK, stream=True)
    assert [next(parts).message.content for _ in range(2)] == ["G", "r"]
    with pytest.raises(ollama.ResponseError, match="out of memory"):
        next(parts)
    with pytest.raises(ollama.ResponseError, match="out of memory") as caught:
        client.chat(NAME, ASK)
    assert caught.value.status_code == 500


def test_closing_the_stream_ends_the_work(client, engine, app):
    engine.pause_after = 3
    check_closing_ends_the_work(client.chat(NAME, ASK, stream=True), engine, app)


def test_empty_parts_where_nothing_comes_for_long(client, engine, monkeypatch):
    monkeypatch.setattr(sse, "PING_S", 0.02)
    engine.pause_after = 3
    parts = client.chat(NAME, ASK, stream=True)
    texts = [part.message.content for part in islice(parts, 8)]
    assert texts == ["G", "r", *[""] * 6] or texts == ["G", "r", "", "ü", *[""] * 4]
    engine.pause_after = None
    assert list(parts)[-1].done_reason == "stop"
    assert eventually(lambda: not engine.live)


def test_a_text_with_line_ends_of_unicode_stays_on_one_line(client, engine, tokenizer):
    text = "one\u2028two\u2029three\x85four\nfive ü"
    says(engine, tokenizer, text)
    assert "".join(part.message.content for part in client.chat(NAME, ASK, stream=True)) == text


@pytest.mark.anyio
async def test_without_messages_the_model_is_loaded(http, engine):
    for fields, reason in (({}, "load"), ({"keep_alive": "5m"}, "load"), ({"keep_alive": 0}, "unload")):
        for messages in ({}, {"messages": []}):
            answer = (await http.post("/api/chat", json={"model": NAME, **messages, **fields})).json()
            assert (answer["message"], answer["done"]) == ({"role": "assistant", "content": ""}, True)
            assert answer["done_reason"] == reason
    assert (await http.post("/api/chat", json={"model": "zz"})).status_code == 404
    assert (await http.post("/api/chat", json={"model": "zz", "keep_alive": 0})).status_code == 404
    assert not engine.submissions


@pytest.mark.anyio
@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", None])
async def test_the_content_type_does_not_matter(http, content_type):
    """`curl -d`, as in Ollama's examples, calls everything a form."""
    headers = {} if content_type is None else {"content-type": content_type}
    body = b'{"model": "fake-model", "messages": [{"role": "user", "content": "x"}]}'
    assert len(lines_of(await http.post("/api/chat", content=body, headers=headers))) == len(REPLY) + 1
    page = {**headers, "origin": "https://elsewhere.example"}
    assert (await http.post("/api/chat", content=body, headers=page)).status_code == 403
    assert (await http.post("/api/chat", content=b"{", headers=headers)).status_code == 400


@given(text=texts_of())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streams_say_the_same_as_whole_answers(app, engine, tokenizer, text):
    says(engine, tokenizer, text)

    async def ask(**fields) -> httpx.Response:
        async with connect(app) as http:
            return await http.post("/api/chat", json=asked(tools=TOOLS, **fields))

    streamed, whole = (asyncio.run(ask(stream=stream)) for stream in (True, False))
    assert without_times(joined(lines_of(streamed))) == without_times(whole.json())
