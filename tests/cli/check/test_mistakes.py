"""Every check finds a mistake: recorded answers are changed, and the check of that rule fails."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from moeflow.cli.check.run import all_checks
from tests.cli.check.conftest import KEY
from tests.cli.check.mistakes import (
    asked,
    drop,
    each_choice,
    edit,
    edit_events,
    edit_success,
    set_to,
    status,
    swap,
    when,
)
from tests.cli.check.recorded import Mistake, Replay, Reply, run

NUMBERS = itertools.count()


def new_text(value: Any) -> None:
    """Answer with another text each time."""
    for choice in value["choices"]:
        _append(choice, str(next(NUMBERS)))


def of_vectors(change: Any) -> Mistake:
    """Change the JSON of answers with vectors."""
    return when(lambda reply: b'"embedding"' in reply.body, edit(change))


def cut(reply: Reply) -> None:
    """End a stream early."""
    if reply.is_stream:
        reply.body = reply.body.rpartition(b"data:")[0]


def without_empty_line(reply: Reply) -> None:
    if reply.is_stream:
        reply.body = reply.body[:-1]


def edit_arguments(reply: Reply) -> None:
    """Stream other arguments than those of the item."""
    if reply.is_stream:
        reply.body = reply.body.replace(b'"delta":"', b'"delta":" ')


def no_stop_string(reply: Reply) -> None:
    """Answer as if there were no stop string."""
    if "stop" in reply.request() or "stop_sequences" in reply.request():
        reply.body = reply.body.replace(b'"stop"', b'"length"').replace(b'"stop_sequence"', b'"end_turn"')


def add_text(text: str) -> Mistake:
    return when(
        lambda reply: "stop" in reply.request() and not reply.request().get("stream"),
        edit(lambda it: [_append(choice, text) for choice in it["choices"]]),
    )


def _append(choice: Any, text: str) -> None:
    if "text" in choice:
        choice["text"] += text
    else:
        choice["message"]["content"] += text


def without_events(*types: str) -> Mistake:
    """Leave events out."""
    return edit_events(lambda events: events.__setitem__(slice(None), [it for it in events if it["type"] not in types]))


GENERATION: dict[str, list[Mistake]] = {
    "required_fields": [
        drop("id"),
        drop("created"),
        drop("choices", 0, "finish_reason"),
        drop("usage", "total_tokens"),
        set_to("now", "created"),
        set_to("thing", "object"),
        set_to("ended", "choices", 0, "finish_reason"),
        set_to(1, "choices", 0, "index"),
        status(500),
        when(lambda reply: b'"choices"' in reply.body, swap("{", "[")),
    ],
    "own_ids": [set_to("x", "id")],
    "usage_sums": [set_to(99, "usage", "total_tokens")],
    "ends_at_max_tokens": [set_to("tool_calls", "choices", 0, "finish_reason")],
    "ends_before_a_stop_string": [no_stop_string, add_text("!")],
    "stream_order": [
        cut,
        without_empty_line,
        swap("data: [DONE]\n\n", ""),
        swap("data: [DONE]", "data: [DONE]\n\ndata: [DONE]"),
        swap("data: ", "datum: "),
        swap('"object":', '"objekt":'),
        edit_events(lambda events: events[1].update(id="another")),
        edit_events(lambda events: events.pop()),
        edit_events(lambda events: events.append(events[-1])),
        when(lambda reply: reply.is_stream, lambda reply: setattr(reply, "media_type", "text/plain")),
        when(lambda reply: reply.is_stream, lambda reply: setattr(reply, "body", b"\xff" + reply.body)),
    ],
    "stream_equals_answer": [
        edit_events(lambda events: events.pop(2)),
        edit_events(lambda events: events.insert(2, events[2])),
    ],
    "stream_usage": [
        edit_events(lambda events: events.pop()),
        edit_events(lambda events: events[-1]["usage"].update(total_tokens=99)),
    ],
    "stream_ends_before_a_stop_string": [no_stop_string, edit_events(lambda events: events.insert(2, events[2]))],
    "several_choices": [edit_success(lambda it: it["choices"].pop()), set_to(0, "choices", 1, "index")],
    "several_streamed_choices": [each_choice(lambda choice: choice.update(index=0))],
    "logprobs": [drop("choices", 0, "logprobs"), swap("-0.25", "2")],
    "same_at_temperature_0": [edit_success(new_text)],
    "same_with_seed": [when(asked("seed"), edit(new_text))],
}
CHAT = {
    "chat.a_whole_conversation": [status(400)],
    "chat.parts_are_their_text": [when(lambda it: b'"type": "text"' in it.asked, set_to(1, "usage", "prompt_tokens"))],
    "chat.max_completion_tokens": [set_to(9, "usage", "completion_tokens")],
    "chat.whole_characters": [swap("🎉", "\ufffd"), swap("🎉", "\\ud83c"), swap("日", "")],
    "chat.required_fields": [set_to("user", "choices", 0, "message", "role")],
    "chat.stream_order": [
        each_choice(lambda choice: choice["delta"].pop("role", None)),
        each_choice(lambda choice: choice.update(finish_reason=None)),
    ],
    "concurrency.streams_at_once": [edit_events(lambda events: events.pop(2))],
}
MODELS = {
    "models.list_models": [swap('"created"', '"made"'), swap('"object":"list"', '"object":"lists"')],
    "models.retrieve_model": [swap('"owned_by"', '"owner"'), swap('"object":"model"', '"object":"engine"')],
    "models.unknown_model_is_not_found": [status(200)],
}
NO_OBJECT = swap('"error"', '"errors"')
CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
TOOLS = {
    "tools.choice_none": [set_to([CALL], "choices", 0, "message", "tool_calls")],
    "tools.choice_auto": [
        set_to([CALL], "choices", 0, "message", "tool_calls"),  # and its reason to end is "stop"
        set_to("", "choices", 0, "message", "content"),
    ],
    "tools.choice_required": [
        drop("choices", 0, "message", "tool_calls"),
        set_to("stop", "choices", 0, "finish_reason"),
        set_to("days", "choices", 0, "message", "tool_calls", 0, "function", "name"),
        drop("choices", 0, "message", "tool_calls", 0, "id"),
    ],
    "tools.choice_named": [
        set_to("{}", "choices", 0, "message", "tool_calls", 0, "function", "arguments"),
        set_to('{"city": "Paris", "days": 4}', "choices", 0, "message", "tool_calls", 0, "function", "arguments"),
        set_to(
            '{"city": "Paris", "days": 2, "x": 1}', "choices", 0, "message", "tool_calls", 0, "function", "arguments"
        ),
        set_to('{"city": "Paris"', "choices", 0, "message", "tool_calls", 0, "function", "arguments"),
        set_to("clock", "choices", 0, "message", "tool_calls", 0, "function", "name"),
    ],
    "tools.one_call_at_most": [edit_success(lambda it: it["choices"][0]["message"]["tool_calls"].append(CALL))],
    "tools.streamed_calls": [
        each_choice(lambda choice: [call.update(index=1) for call in choice["delta"].get("tool_calls") or ()]),
        each_choice(lambda choice: [call.pop("id", None) for call in choice["delta"].get("tool_calls") or ()]),
        each_choice(
            lambda choice: [call["function"].pop("name", None) for call in choice["delta"].get("tool_calls") or ()]
        ),
        each_choice(
            lambda choice: [it["function"].update(arguments="[") for it in choice["delta"].get("tool_calls") or ()]
        ),
    ],
    "tools.results": [set_to([CALL], "choices", 0, "message", "tool_calls"), status(500)],
    "schemas.json_object": [set_to("[]", "choices", 0, "message", "content")],
    "schemas.json_schema": [
        set_to("{}", "choices", 0, "message", "content"),
        set_to('{"city": "Rome", "days": 2}', "choices", 0, "message", "content"),
        set_to(None, "choices", 0, "message", "content"),
    ],
    "schemas.streamed_json_schema": [each_choice(lambda choice: choice["delta"].update(content="["))],
}
ERRORS = {
    **{
        f"errors.{name}": [status(200), status(422), status(500), NO_OBJECT]
        for name in (
            "bad_json",
            "missing_messages",
            "wrong_types",
            "refused_stream",
            "unknown_model",
            "too_long_prompt",
        )
    },
    "errors.wrong_key": [when(lambda reply: reply.status == 401, status(403)), NO_OBJECT],
    "errors.unknown_path": [status(200), status(500)],
    "errors.wrong_method": [status(200), status(500)],
    "errors.large_body": [status(500), NO_OBJECT],
    "errors.closed_stream": [when(lambda reply: not reply.request().get("stream"), status(503))],
}
EMBEDDINGS = {
    "embeddings.required_fields": [
        of_vectors(lambda it: it["data"].pop()),
        of_vectors(lambda it: it["data"][1].update(index=2)),
        of_vectors(lambda it: it["data"][1]["embedding"].pop()),
        of_vectors(lambda it: it.pop("usage")),
        of_vectors(lambda it: it["data"][0].update(object="vector")),
    ],
    "embeddings.equal_texts": [of_vectors(lambda it: it["data"][2]["embedding"].__setitem__(0, 999.0))],
    "embeddings.base64_format": [
        when(asked("encoding_format", "base64"), of_vectors(lambda it: it["data"][0].update(embedding="AAAA"))),
        when(asked("encoding_format", "base64"), of_vectors(lambda it: it["data"][0].update(embedding=[1.0]))),
    ],
    "embeddings.bad_requests": [status(200), status(422), NO_OBJECT],
}
IS_BLOCKS = lambda reply: isinstance(reply.request().get("system"), list)  # noqa: E731
MESSAGES = {
    "messages.required_fields": [
        drop("id"),
        drop("stop_sequence"),
        drop("usage", "input_tokens"),
        set_to("ended", "stop_reason"),
        set_to("user", "role"),
        set_to([], "content"),
        set_to("text", "content"),
    ],
    "messages.ends_at_max_tokens": [set_to("end_turn", "stop_reason"), set_to(9, "usage", "output_tokens")],
    "messages.ends_before_a_stop_sequence": [
        no_stop_string,
        when(asked("stop_sequences"), set_to(None, "stop_sequence")),
        when(asked("stop_sequences"), edit_success(lambda it: it["content"][0].update(text="another"))),
    ],
    "messages.system": [when(IS_BLOCKS, set_to(1, "usage", "input_tokens")), set_to(5, "usage", "input_tokens")],
    "messages.stream_order": [
        cut,
        without_events("message_stop"),
        without_events("message_delta"),
        without_events("content_block_stop"),
        without_events("content_block_start"),
        without_events("message_start"),
        swap("event: message_start", "event: start"),
        swap('"index":0', '"index":1'),
        swap('"text_delta"', '"words_delta"'),
        edit_events(lambda events: events.append({"type": "ping"}) or events.append(events[0])),
    ],
    "messages.stream_equals_message": [
        edit_events(lambda events: events.insert(4, events[4])),
        when(lambda reply: reply.is_stream, swap('"output_tokens":12', '"output_tokens":13')),
        when(lambda reply: reply.is_stream, swap('"max_tokens"', '"end_turn"')),
    ],
    "messages.tool_use": [
        edit_success(lambda it: it["content"][-1].update(input={})),
        edit_success(lambda it: it["content"][-1].update(name="clock")),
        set_to("end_turn", "stop_reason"),
    ],
    "messages.streamed_tool_use": [
        swap('"input_json_delta"', '"text_delta"'),
        edit_events(
            lambda events: [it["delta"].update(partial_json="[") for it in events if "index" in it and "delta" in it]
        ),
        without_events("content_block_delta"),
    ],
    "messages.tool_result": [status(500)],
    "messages.count_tokens": [swap('"input_tokens"', '"tokens"'), edit(lambda it: it.update(input_tokens=5))],
    "messages.bad_requests": [
        status(200),
        status(422),
        NO_OBJECT,
        swap('"invalid_request_error"', '"api_error"'),
        swap('"type":"error",', ""),
    ],
    "messages.unknown_model": [status(200), status(400), swap('"not_found_error"', '"api_error"')],
    "messages.wrong_key": [when(lambda reply: reply.status == 401, status(403)), swap("authentication_error", "x")],
    "messages.too_large": [status(400), swap("request_too_large", "api_error")],
}
LAST = {"response.completed", "response.incomplete"}
RESPONSES = {
    "responses.required_fields": [
        drop("id"),
        drop("output"),
        drop("parallel_tool_calls"),
        set_to([], "output"),
        set_to("failed", "status"),
        edit_success(lambda it: it["output"][0].update(role="user")),
        edit_success(lambda it: it["output"][0]["content"][0].pop("annotations")),
    ],
    "responses.usage_sums": [set_to(99, "usage", "total_tokens"), set_to(None, "usage")],
    "responses.ends_at_max_tokens": [
        set_to("completed", "status"),
        set_to(None, "incomplete_details"),
        set_to({"reason": "content_filter"}, "incomplete_details"),
    ],
    "responses.items_as_input": [status(500)],
    "responses.stream_order": [
        without_events("response.created"),
        without_events("response.in_progress"),
        without_events(*LAST),
        without_events("response.output_text.delta"),
        edit_events(lambda events: [it.pop("sequence_number") for it in events]),
        edit_events(lambda events: events[-1]["response"].update(output=[])),
        edit_events(lambda events: events.append({**events[-1], "sequence_number": len(events)})),
        swap("event: response.created", "event: created"),
    ],
    "responses.stream_equals_response": [
        edit_events(
            lambda events: [it.update(delta="x") for it in events if it["type"] == "response.output_text.delta"]
        ),
        when(
            lambda reply: not reply.is_stream, edit_success(lambda it: it["output"][0]["content"][0].update(text="x"))
        ),
    ],
    "responses.stored": [
        when(lambda reply: reply.asked == b"", status(404)),
        when(lambda reply: reply.asked == b"", edit(lambda it: it.update(output=[]))),
        when(asked("previous_response_id"), set_to(None, "previous_response_id")),
        when(asked("previous_response_id"), set_to(1, "usage", "input_tokens")),
    ],
    "responses.not_stored": [when(lambda reply: reply.asked == b"", status(200))],
    "responses.function_call": [
        edit_success(lambda it: it["output"][-1].update(arguments="{}")),
        edit_success(lambda it: it["output"][-1].pop("call_id")),
        edit_success(lambda it: it["output"].append(it["output"][-1])),
    ],
    "responses.streamed_function_call": [without_events("response.function_call_arguments.delta"), edit_arguments],
    "responses.function_results": [status(500)],
    "responses.json_schema": [edit_success(lambda it: it["output"][-1]["content"][0].update(text="{}"))],
    "responses.bad_requests": [status(200), status(422), NO_OBJECT],
    "responses.unknown_response": [status(200), NO_OBJECT],
}
OWN = {**MODELS, **CHAT, **TOOLS, **ERRORS, **EMBEDDINGS, **MESSAGES, **RESPONSES}
SHARED = {f"{area}.{name}": them for area in ("completions", "chat") for name, them in GENERATION.items()}
MISTAKES = {name: [*SHARED.get(name, ()), *OWN.get(name, ())] for name in {**SHARED, **OWN}}


@pytest.mark.parametrize("name", [check.full_name for check in all_checks()])
def test_a_mistake_is_found(checked, name):
    _, replies = checked
    assert MISTAKES.get(name), "every check needs a mistake"
    for number, mistake in enumerate(MISTAKES[name]):
        (result,) = run(Replay(replies, mistake), name, key=KEY)
        assert result.status in ("FAILED", "warning"), f"mistake {number}: {result}"
        assert result.reason
        assert result.curl
