"""Schemas of MCP servers: tool choice `auto` takes any; an enforced one holds, or its refusal names the keyword."""

from __future__ import annotations

import json
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import jsonschema
import openai
import pytest

from moeflow.engine.constraints.checker import GrammarChecker
from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.text.tokenizer import Tokenizer
from tests.mcp_tools import chat_tool, chat_tools, mcp_tools
from tests.server.conversing import openai_client
from tests.server.fake_client import NAME
from tests.server.walking_client import MAX_TOKENS, WalkingClient

ASK = [{"role": "user", "content": "Which files are there?"}]
NUM_ANSWERS = 2
TEXT = {"type": "string", "maxLength": 8}


def with_properties(properties: dict[str, Any], **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **keywords}


def with_value(**value: Any) -> dict[str, Any]:
    return with_properties({"a": value}, required=["a"])


TREE = with_properties({"name": TEXT, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}})
HELD = {
    "nested maxLength of 10,000": with_value(
        type="array", maxItems=3, items=with_value(type="string", maxLength=10_000), minItems=1
    ),
    "unanchored pattern": with_value(type="string", pattern="[0-9]x", maxLength=12),
    "not anything": with_value(anyOf=[{"not": {}}, TEXT]),
    "$ref into items": with_properties(
        {"a": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2}, "b": {"$ref": "#/properties/a/items"}},
        required=["b"],
    ),
    "$ref with other keywords": with_properties(
        {"a": {"$ref": "#/$defs/b", "description": "A b.", "default": "x"}}, required=["a"], **{"$defs": {"b": TEXT}}
    ),
    "recursion": TREE,
    "propertyNames of any text": with_value(
        type="object", propertyNames={"type": "string"}, additionalProperties={"type": "integer"}, maxProperties=2
    ),
    "propertyNames of a pattern": with_value(type="object", propertyNames={"pattern": "^x_"}, maxProperties=2),
    "propertyNames of a list": with_value(
        type="object", propertyNames={"type": "string", "enum": ["x", "y"]}, additionalProperties=TEXT
    ),
    "$schema": with_value(type="null") | {"$schema": "http://json-schema.org/draft-07/schema#"},
    "$schema of its own": with_value(type="null") | {"$schema": "https://example.com/schema"},
    "$schema within": with_value(type="null", **{"$schema": "https://json-schema.org/draft/2020-12/schema"}),
    "$id": with_value(type="null") | {"$id": "https://example.com/tool"},
    "format": with_properties({"a": {"type": "string", "format": "date"}, "b": {"type": "string", "format": "uuid"}}),
    "format of its own": with_value(format="markdown", **TEXT),
    "format of a number": with_value(type="integer", format="int32"),
    "default": with_value(default="x", **TEXT),
    "examples": with_value(examples=["x"], example="y", **TEXT),
    "title": with_value(title="A", **TEXT) | {"title": "Arguments"},
    "additionalProperties false": with_properties({"a": {"type": "null"}}),
    "additionalProperties true": with_properties({"a": {"type": "null"}}, additionalProperties=True),
    "additionalProperties schema": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "patternProperties": with_properties({}, patternProperties={"^x_": {"type": "boolean"}}, maxProperties=2),
    "dependentRequired": with_properties(
        {"a": {"type": "null"}, "b": {"type": "null"}}, dependentRequired={"a": ["b"], "b": ["a"]}
    ),
    "dependencies": with_properties({"a": {"type": "null"}, "b": {"type": "null"}}, dependencies={"a": ["b"]}),
    "minProperties": with_properties({"a": {"type": "null"}, "b": {"type": "null"}}, required=["a"], minProperties=1),
    "uniqueItems false": with_value(type="array", items=TEXT, uniqueItems=False, maxItems=2),
    "boolean schemas": with_properties({"a": True, "b": False}),
    "type list": with_value(type=["boolean", "integer", "null"]),
    "nullable": with_value(nullable=True, **TEXT),
    "x-*": with_value(**TEXT, **{"x-order": 1, "x-guidance": {"lenient": True}}) | {"x-google-identifier": "a"},
    "unknown keyword": with_value(placeholder="x", **TEXT),
    "empty schema": {},
    "properties without type": {
        "properties": {"a": {"type": "null"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "property without type": with_value(description="Anything."),
    "discriminator": with_value(
        discriminator={"propertyName": "kind"},
        oneOf=[
            with_properties({"kind": {"const": "x"}}, required=["kind"]),
            with_properties({"kind": {"const": "y"}, "y": TEXT}, required=["kind"]),
        ],
    ),
    "anyOf of required": with_properties(
        {"a": {"type": "null"}, "b": {"type": "null"}}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # with what the refusal names
    "not": (with_value(**{"not": {"enum": ["x"]}}), '"not"'),
    "if": (with_properties({"a": TEXT}, **{"if": {"required": ["a"]}, "then": {"required": ["a"]}}), '"if", "then"'),
    "uniqueItems": (with_value(type="array", items=TEXT, uniqueItems=True), '"uniqueItems"'),
    "contains": (with_value(type="array", contains=TEXT), '"contains"'),
    "propertyNames": (with_value(type="object", propertyNames={"maxLength": 3}), '"propertyNames"'),
    "minProperties": (with_properties({"a": TEXT, "b": TEXT, "c": TEXT}, minProperties=2), "minProperties"),
    "maxProperties": (with_properties({"a": TEXT, "b": TEXT, "c": TEXT}, maxProperties=2), "maxProperties"),
    "oneOf": (with_value(oneOf=[TEXT, {"type": "string", "enum": ["x"]}]), "oneOf"),
    "pattern": (with_value(type="string", pattern="^(?!x)"), "pattern"),
    "format": (with_value(type="string", format="uri-reference"), "format"),
    "type": (with_value(type="any"), "type"),
    "$ref": (with_value(**{"$ref": "#/$defs/missing"}), r"\$ref"),
    "required": (with_properties({"a": TEXT}, required=["b"]), "required"),
}
ALL = {**HELD, **{name: schema for name, (schema, _) in REFUSED.items()}}


class Asker:
    """A client of a server without a model."""

    def __init__(self, client: openai.OpenAI, engine: WalkingClient) -> None:
        self._client = client
        self.engine = engine

    def ask(self, **changes: Any) -> Any:
        """Return the answer to a request."""
        return self._client.chat.completions.create(
            **{"model": NAME, "messages": ASK, "max_tokens": MAX_TOKENS, **changes}
        )

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of another API."""
        answer: dict[str, Any] = self._client.post(f"/{path}", body=body, cast_to=object)
        return answer

    def arguments(self, tools: list[dict[str, Any]]) -> tuple[str, Any]:
        """Return the name and arguments of a call that has to be made."""
        answer = self.ask(tools=tools, tool_choice="required", parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    def form(self, schema: dict[str, Any]) -> Any:
        """Return an answer that has to be as a schema says."""
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return json.loads(self.ask(response_format=form).choices[0].message.content)


@pytest.fixture(scope="module")
def asker(tokenizer: Tokenizer) -> Iterator[Asker]:
    engine = WalkingClient(tokenizer, max_model_len=2**17)
    app = create_app(Generator(engine, tokenizer), ServerConfig())
    with openai_client(app) as client:
        yield Asker(client, engine)


def check(schema: dict[str, Any], value: Any) -> None:
    jsonschema.Draft202012Validator(
        {**schema, "$schema": jsonschema.Draft202012Validator.META_SCHEMA["$schema"]},
        format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
    ).validate(value)


@pytest.mark.parametrize("name", ALL)
def test_auto_takes_any_schema(asker, name):
    assert asker.ask(tools=[chat_tool("look", ALL[name])]).choices[0].finish_reason == "stop"
    assert asker.engine.submissions[-1].sampling.grammar == ""


@pytest.mark.parametrize("name", ALL)
def test_auto_takes_any_schema_beside_a_strict_tool(asker, name):
    tools = [chat_tool("look", ALL[name]), chat_tool("go", with_properties({}), is_strict=True)]
    asker.ask(tools=tools)
    assert asker.engine.submissions[-1].sampling.grammar


@pytest.mark.parametrize("name", HELD)
def test_what_is_enforced_holds(asker, name):
    for _ in range(NUM_ANSWERS):
        called, arguments = asker.arguments([chat_tool("look", HELD[name])])
        assert called == "look"
        check(HELD[name], arguments)
        check(HELD[name], asker.form(HELD[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_keyword_and_the_tool(asker, name):
    schema, named = REFUSED[name]
    tools = [chat_tool("go", with_properties({})), chat_tool("look", schema)]
    strict = [tools[0], chat_tool("look", schema, is_strict=True)]
    for changes in ({"tools": tools, "tool_choice": "required"}, {"tools": strict}):
        with pytest.raises(openai.BadRequestError, match=f"arguments of 'look': .*{named}") as caught:
            asker.ask(**changes)
        assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match=named) as caught:
        asker.form(schema)
    assert caught.value.param == "response_format"


def test_all_tools_at_once(asker):
    tools = chat_tools()
    assert len(tools) > 30
    assert asker.ask(tools=tools).choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match=r"arguments of 'create_issue': .*\"uniqueItems\""):
        asker.ask(tools=tools, tool_choice="required")
    held = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    del held["create_issue"]
    for _ in range(4 * NUM_ANSWERS):
        name, arguments = asker.arguments([chat_tool(name, schema) for name, schema in held.items()])
        check(held[name], arguments)


def test_other_apis_take_all_tools(asker):
    named = [{"name": tool["name"], "description": tool["description"]} for tool in mcp_tools()]
    schemas = [tool["inputSchema"] for tool in mcp_tools()]
    responses = [{"type": "function", **one, "parameters": schema} for one, schema in zip(named, schemas, strict=True)]
    messages = [{**one, "input_schema": schema} for one, schema in zip(named, schemas, strict=True)]
    assert asker.post("responses", {"model": NAME, "input": "Hello.", "tools": responses})["status"] == "completed"
    body = {"model": NAME, "messages": ASK, "max_tokens": MAX_TOKENS, "tools": messages}
    assert asker.post("messages", body)["stop_reason"] == "end_turn"


def test_a_grammar_is_checked_once_and_none_for_auto(asker, monkeypatch):
    checked = []
    ask = GrammarChecker._ask
    monkeypatch.setattr(GrammarChecker, "_ask", lambda self, request: checked.append(request) or ask(self, request))
    tools = [chat_tool("once", with_value(const="once"))]
    asker.ask(tools=tools)
    assert not checked
    for _ in range(2):
        asker.ask(tools=tools, tool_choice="required")
        assert len(checked) == 1


def test_another_answer_ends_while_a_grammar_is_checked(asker, monkeypatch):
    may_end, has_begun = Event(), Event()
    ask = GrammarChecker._ask

    def slow(self: GrammarChecker, request: Any) -> Any:
        has_begun.set()
        assert may_end.wait(60)
        return ask(self, request)

    monkeypatch.setattr(GrammarChecker, "_ask", slow)
    waiting = Thread(target=asker.form, args=(with_value(const="slow"),))
    waiting.start()
    try:
        assert has_begun.wait(60)
        chunks = list(asker.ask(tools=chat_tools(), stream=True))
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert waiting.is_alive()
    finally:
        may_end.set()
        waiting.join()
