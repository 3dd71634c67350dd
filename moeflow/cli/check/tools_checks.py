"""Checks of tools and structured outputs in `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from moeflow.cli.check.area import Area, Check
from moeflow.cli.check.forms import ChatForm
from moeflow.cli.check.openai_shapes import ChatChunk, Choice, ToolCall
from moeflow.cli.check.outcome import Failed, Skipped, expect, expect_equal
from moeflow.cli.check.target import Target

FORM = ChatForm()
MAX_TOKENS = 100  # enough for a call


class Weather(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the tool, and the answer in JSON."""

    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


ASK = [{"role": "user", "content": "Look up the weather in Paris for 2 days."}]


_ONE = {"parallel_tool_calls": False}


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a struct without references."""
    _, components = msgspec.json.schema_components([kind])
    schema = components[kind.__name__]
    return {name: schema[name] for name in ("type", "properties", "required", "additionalProperties")}


def read_weather(text: str) -> Weather:
    """Return what JSON says. Raises: Failed if it does not follow the schema."""
    try:
        return msgspec.json.decode(text, type=Weather)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Failed(f"the JSON must follow the schema ({error}): {text[:200]!r}") from None


def tools() -> list[dict[str, Any]]:
    """Return a tool with arguments and one without."""
    weather = {"name": "weather", "description": "Looks up weather.", "parameters": schema_of(Weather), "strict": True}
    clock = {"name": "clock", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}}
    return [{"type": "function", "function": it} for it in (weather, clock)]


def named(name: str) -> dict[str, Any]:
    """Return the choice of one tool."""
    return {"type": "function", "function": {"name": name}}


def _call(target: Target, tool_choice: object, **changes: Any) -> Choice:
    fields = {"messages": ASK, "tools": tools(), "tool_choice": tool_choice, "max_tokens": MAX_TOKENS, **changes}
    (choice,) = FORM.ask(target, **fields).choices
    return choice


def _check_calls(calls: Sequence[ToolCall]) -> None:
    ids = [call.id for call in calls]
    expect(len(set(ids)) == len(ids), f"calls must have different ids: {ids}")
    for call in calls:
        expect(call.function.name in ("weather", "clock"), f"there is no tool {call.function.name!r}")
        if call.function.name == "weather":
            read_weather(call.function.arguments)
        else:
            _read_object(call.function.arguments)


def _read_object(text: str) -> None:
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Failed(f"arguments must be a JSON object ({error}): {text[:200]!r}") from None


def choice_none(target: Target) -> None:
    """With tool_choice `none` an answer calls no tool."""
    choice = _call(target, "none", max_tokens=8)
    expect(not choice.message.tool_calls, f"there must be no calls, not {choice.message.tool_calls}")


def choice_auto(target: Target) -> None:
    """With tool_choice `auto` an answer has text, or calls with JSON objects."""
    choice = _call(target, "auto")
    calls = choice.message.tool_calls or []
    expect(calls or choice.message.content, "an answer must have text or calls")
    expect((choice.finish_reason == "tool_calls") == bool(calls), f"{choice.finish_reason} with {len(calls)} calls")
    for call in calls:
        _read_object(call.function.arguments)


def choice_required(target: Target) -> None:
    """With tool_choice `required` an answer has calls of its tools, with arguments by their schemas."""
    choice = _call(target, "required")
    expect(choice.message.tool_calls, "an answer must have calls")
    expect_equal(choice.finish_reason, "tool_calls", "finish_reason")
    _check_calls(choice.message.tool_calls or [])


def choice_named(target: Target) -> None:
    """With one named tool an answer calls that tool, with arguments by its schema."""
    calls = _call(target, named("weather"), **_ONE).message.tool_calls or []
    expect_equal([call.function.name for call in calls], ["weather"], "called tools")
    _check_calls(calls)


def one_call_at_most(target: Target) -> None:
    """With parallel_tool_calls false an answer has one call."""
    calls = _call(target, "required", **_ONE).message.tool_calls or []
    expect_equal(len(calls), 1, "the number of calls")


def streamed_calls(target: Target) -> None:
    """The parts of a streamed call have its index; the first one has id and name. Their arguments follow the schema."""
    fields = {"messages": ASK, "tools": tools(), "tool_choice": named("weather"), "max_tokens": MAX_TOKENS}
    calls = _join_calls(FORM.chunks(target, **fields, **_ONE))
    expect_equal([call.function.name for call in calls], ["weather"], "called tools")
    _check_calls(calls)


def _join_calls(chunks: Sequence[ChatChunk]) -> list[ToolCall]:
    """Return the calls of a stream. Raises: Failed if the first part of one lacks its id or name."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for part in (part for choice in chunk.choices for part in choice.delta.tool_calls or ()):
            function = part.function
            if part.index == len(calls):
                expect(
                    part.id and function and function.name, f"the first part of a call must have id and name: {part}"
                )
                assert function is not None
                calls.append({"id": part.id, "name": function.name, "arguments": ""})
            expect(part.index == len(calls) - 1, f"index {part.index} must not follow call {len(calls) - 1}")
            calls[-1]["arguments"] += (function and function.arguments) or ""
    return [
        msgspec.convert(
            {"id": it["id"], "type": "function", "function": {"name": it["name"], "arguments": it["arguments"]}},
            ToolCall,
        )
        for it in calls
    ]


def results(target: Target) -> None:
    """A conversation continues after a call and its result."""
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:30"},
    ]
    (choice,) = FORM.ask(target, messages=messages, tools=tools(), tool_choice="none", max_tokens=8).choices
    expect(not choice.message.tool_calls, "there must be no calls")


def json_object(target: Target) -> None:
    """With response_format `json_object` an answer that ends is a JSON object."""
    ask = [{"role": "user", "content": "Give a short JSON object with the key city."}]
    (choice,) = FORM.ask(target, messages=ask, response_format={"type": "json_object"}, max_tokens=MAX_TOKENS).choices
    if choice.finish_reason == "length":
        raise Skipped(f"the answer is longer than {MAX_TOKENS} tokens")
    _read_object(choice.message.content or "")


def json_schema(target: Target) -> None:
    """With response_format `json_schema` an answer follows the schema."""
    read_weather(FORM.ask(target, **_by_schema()).choices[0].message.content or "")


def streamed_json_schema(target: Target) -> None:
    """The joined parts of a stream with `json_schema` follow the schema."""
    (part,) = FORM.streamed(FORM.chunks(target, **_by_schema()))
    read_weather(part.text)


def _by_schema() -> dict[str, Any]:
    described = {"name": "weather", "schema": schema_of(Weather), "strict": True}
    response_format = {"type": "json_schema", "json_schema": described}
    return {"messages": ASK, "response_format": response_format, "max_tokens": MAX_TOKENS}


def tools_checks() -> list[Check]:
    """Return the checks."""
    area, source = Area("tools", FORM.path), "OpenAI API reference: chat, create"
    forms = Area("schemas", FORM.path)
    choices = (choice_none, choice_auto, choice_required, choice_named)
    return [
        *(area.check(run, f"{source}, tool_choice", optional=True) for run in choices),
        area.check(one_call_at_most, f"{source}, parallel_tool_calls", optional=True),
        area.check(streamed_calls, "OpenAI API reference: chat, streaming", optional=True),
        area.check(results, f"{source}, messages", optional=True),
        *(
            forms.check(run, f"{source}, response_format", optional=True)
            for run in (json_object, json_schema, streamed_json_schema)
        ),
    ]
