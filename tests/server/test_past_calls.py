"""Earlier calls over HTTP: arguments as text, as an object, and none; refusals name the call."""

from __future__ import annotations

import pytest

from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.engine.fakes import byte_level_core, wrap
from tests.server.conftest import connect
from tests.server.fake_client import FakeClient
from tests.tiny_mixtral import EOS

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments|items %}<parameter={{ k }}>\n{{ v }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}{% endfor %}{% if tools %}{% endif %}"
)
pytestmark = pytest.mark.anyio


@pytest.fixture
async def served():
    tokenizer = wrap(byte_level_core(), eos_token="<|end|>", chat_template=TEMPLATE)
    engine = FakeClient(tokenizer, max_model_len=4096)
    async with connect(create_app(Generator(engine, tokenizer), ServerConfig())) as http:
        yield http, engine, tokenizer
    tokenizer.close()


def chat(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return "/v1/chat/completions", {
        "messages": [
            {"role": "user", "content": "Which?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "brown"},
        ]
    }


def response(arguments):
    return "/v1/responses", {
        "input": [
            {"role": "user", "content": "Which?"},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": arguments},
            {"type": "function_call_output", "call_id": "1", "output": "brown"},
        ]
    }


@pytest.mark.parametrize("ask", [chat, response])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"q": "fox"}', "<parameter=q>\nfox\n</parameter>\n"),
        ({"q": "fox", "n": [1]}, "<parameter=q>\nfox\n</parameter>\n<parameter=n>\n[1]\n</parameter>\n"),
        ({}, ""),
        ("", ""),
        ("null", ""),
        (None, ""),
    ],
)
async def test_arguments_reach_the_model(served, ask, arguments, shown):
    http, engine, tokenizer = served
    path, body = ask(arguments)
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    prompt = tokenizer.decode(engine.submissions[-1].prompt_token_ids)
    assert prompt.endswith(f"<function=look>\n{shown}</function>\n</tool_call>tool:brown")


@pytest.mark.parametrize(("ask", "place"), [(chat, "messages[1].tool_calls[0]"), (response, "input[1]")])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_refusal_names_the_call(served, ask, place, is_stream):
    http, _, _ = served
    path, body = ask('{"q": "fo')
    answer = await http.post(path, json=body | {"stream": is_stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == place
    assert error["message"].startswith(f"{place}: the arguments of this call of 'look' are no JSON")


@pytest.mark.parametrize("ask", [chat, response])
@pytest.mark.parametrize("arguments", [[1], 5, True])
async def test_other_types_are_refused_by_name(served, ask, arguments):
    http, _, _ = served
    path, body = ask(arguments)
    answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].endswith("arguments")
    assert "an object" in answer.json()["error"]["message"]


async def test_a_call_of_a_stored_response_that_is_cut_off(served):
    http, engine, tokenizer = served
    text = "<tool_call>\n<function=look>\n<parameter=q>\nfo"
    engine.reply = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    tool = {"type": "function", "name": "look", "parameters": {"properties": {"q": {"type": "string"}}}}
    first = (await http.post("/v1/responses", json={"input": "Which?", "tools": [tool]})).json()
    (item,) = first["output"]
    assert item["arguments"] == '{"q": "fo'
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "brown"}
    body = {"input": [result], "previous_response_id": first["id"]}
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "previous_response_id"
    assert "'look'" in answer.json()["error"]["message"]
