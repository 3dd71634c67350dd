"""Structured output over HTTP from a tiny random model, as the official client asks for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.packed import pack_beside
from tests.server.server_process import Server
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.slow
ASK = [{"role": "user", "content": "Which fox?"}]
SIGNS = {"4": 5.0, "94": 5.0, "96": 5.0, "62": 5.0}  # bytes that end things; see `write_byte_tokenizer`
NOT_ONE = {"not": {"const": 1}}


class Fox(BaseModel):
    color: Literal["red", "brown"]
    age: int
    is_quick: bool


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"where": {"enum": ["den", "wood"]}, "times": {"type": "integer", "maximum": 9}},
                "required": ["where", "times"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "go"}},
]


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("tiny-mixtral")
    write_tiny_mixtral(folder, max_position_embeddings=2048)
    pack_beside(folder)
    server = Server(folder)
    with server.process:  # which closes its pipes
        try:
            url = server.wait_until_ready().url
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                yield client
        finally:
            server.process.terminate()
            server.end()


def ask(client, **changes):
    values = {"model": client.models.list().data[0].id, "messages": ASK, "max_tokens": 300, "seed": 1, **changes}
    return client.chat.completions.create(**values)


def test_a_pydantic_model(client):
    answer = client.chat.completions.parse(
        model=client.models.list().data[0].id, messages=ASK, response_format=Fox, max_tokens=300, logit_bias=SIGNS
    )
    assert isinstance(answer.choices[0].message.parsed, Fox)


def test_any_object(client):
    answer = ask(client, response_format={"type": "json_object"}, logit_bias=SIGNS)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{2}-[a-c]"}}, "[0-9]{2}-[a-c]"),
        ({"structured_outputs": {"choice": ["red", "brown"]}}, "red|brown"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "a|b"),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "1|2"),
        ({"guided_json": '{"enum": [1, 2]}'}, "1|2"),
        ({"guided_regex": "x{3}"}, "xxx"),
        ({"guided_choice": ["red"]}, "red"),
        ({"guided_grammar": 'start: "a"'}, "a"),
    ],
)
def test_vllms_fields(client, fields, pattern):
    assert re.fullmatch(pattern, ask(client, extra_body=fields).choices[0].message.content)
    answer = client.completions.create(
        model=client.models.list().data[0].id, prompt="x", max_tokens=99, extra_body=fields
    )
    assert re.fullmatch(pattern, answer.choices[0].text)


def arguments_are_right(call):
    arguments = json.loads(call.function.arguments)
    if call.function.name == "look":
        assert arguments.keys() == {"where", "times"}
        assert arguments["where"] in ("den", "wood")
    else:
        assert call.function.name == "go"
        assert arguments == {}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be_made(client, stream):
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        answer = ask(
            client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=stream, logit_bias=SIGNS
        )
        if stream:
            deltas = [chunk.choices[0] for chunk in answer]
            (begun, *pieces) = [call for delta in deltas for call in delta.delta.tool_calls or ()]
            begun.function.arguments = "".join(piece.function.arguments for piece in pieces)
            call, reason = begun, deltas[-1].finish_reason
        else:
            (call,) = answer.choices[0].message.tool_calls
            reason = answer.choices[0].finish_reason
            assert answer.choices[0].message.content is None
        assert reason == "tool_calls"
        assert choice == "required" or call.function.name == "look"
        arguments_are_right(call)


@pytest.mark.parametrize(
    ("changes", "param", "reason"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NOT_ONE}}},
            "response_format",
            'keywords of a schema, leave them out: \\["not"\\]',
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "send one of text, json_object, json_schema"),
        ({"extra_body": {"guided_regex": "a(b"}}, "response_format", "unclosed group"),
        ({"extra_body": {"guided_json": "{"}}, None, "the schema is not JSON"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, None, "one form only"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs", "give one of"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": NOT_ONE}}],
                "tool_choice": "required",
            },
            "tools",
            "the arguments of 'f': .*\"not\"",
        ),
    ],
)
def test_what_cannot_be_held_to(client, changes, param, reason):
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        ask(client, **changes)
    assert caught.value.param == param


MUTUAL = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
TOO_MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(600)}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"guided_regex": "\\"}, "ends in a backslash"),
        ({"guided_regex": r"[^\s\S]"}, "nothing can follow"),
        ({"guided_grammar": "start: start"}, "nothing can follow"),
        ({"guided_json": {"$ref": "#"}}, "nothing can follow"),
        ({"guided_json": MUTUAL}, "nothing can follow"),
        ({"guided_json": TOO_MANY}, "max is 2000"),
    ],
)
def test_a_limit_is_an_error_400_before_the_first_byte(client, fields, reason, stream):
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        ask(client, extra_body=fields, stream=stream)
    assert caught.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError, match=reason):
        client.completions.create(model=client.models.list().data[0].id, prompt="x", stream=stream, extra_body=fields)


def test_thousands_of_choices(client):
    choices = [f"{i} choices" for i in range(4_096)]
    assert ask(client, extra_body={"guided_choice": choices}).choices[0].message.content in choices


LATE = "start: /[a-z]{20}/ many\nmany: " + " | ".join(f'"{i} and more"' for i in range(2_100))


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_that_an_answer_meets_later_is_no_fault_of_the_server(client, stream):
    with pytest.raises(openai.APIError, match="cannot be held to its form") as caught:
        list(ask(client, extra_body={"guided_grammar": LATE}, stream=stream))
    assert caught.value.code == "invalid_value"
    assert caught.value.type == "invalid_request_error"
