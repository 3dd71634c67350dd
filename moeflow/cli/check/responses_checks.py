"""Checks of OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeflow.cli.check.area import Area, Check
from moeflow.cli.check.forms import ASK, NUM_TOKENS, convert
from moeflow.cli.check.openai_shapes import ErrorAnswer
from moeflow.cli.check.outcome import Skipped, expect, expect_equal
from moeflow.cli.check.responses_shapes import Event, Item, Response
from moeflow.cli.check.stream_order import ResponseOrder
from moeflow.cli.check.target import Body, Target
from moeflow.cli.check.tools_checks import MAX_TOKENS, Weather, read_weather, schema_of

PATH = "/v1/responses"
_CALL = "Look up the weather in Paris for 2 days."


def _body(target: Target, **changes: Any) -> Body:
    fields = {"model": target.model, "input": ASK, "max_output_tokens": NUM_TOKENS, "temperature": 0, "store": False}
    return {**fields, **changes}


def _ask(target: Target, *, again: bool = False, **changes: Any) -> Response:
    return target.ask(PATH, _body(target, **changes), Response, again=again)


def _events(target: Target, **changes: Any) -> Sequence[Event]:
    """Return the events of a stream. Raises: Failed if one has another shape, or comes at the wrong time."""
    order, events = ResponseOrder(), []
    for event in target.stream(PATH, _body(target, **changes)):
        value = event.value()
        expect_equal(event.name, value.get("type"), "the line `event:`")
        events.append(convert(value, Event))
        order.take(value)
    order.end()
    expect_equal([event.type for event in events[:1]], ["response.created"], "the first event")
    return events


def required_fields(target: Target) -> None:
    """A response has all required fields, and a message."""
    response = _ask(target)
    expect(response.status in ("completed", "incomplete"), f"the status must be completed, not {response.status}")
    expect(any(item.type == "message" for item in response.output), "the output must have a message")
    for item in response.output:
        expect(item.type != "message" or item.role == "assistant", f"the role must be assistant, not {item.role}")


def usage_sums(target: Target) -> None:
    """Input and output tokens add up to the total."""
    usage = _ask(target).usage
    expect(usage is not None and usage.output_tokens > 0, "usage must have output_tokens")
    assert usage is not None
    expect_equal(usage.total_tokens, usage.input_tokens + usage.output_tokens, "total_tokens")


def ends_at_max_tokens(target: Target) -> None:
    """A response that max_output_tokens ends is incomplete, with that reason."""
    usage = _ask(target).usage
    if usage is not None and usage.output_tokens < NUM_TOKENS:
        raise Skipped("the model ends its answer by itself")
    response = _ask(target)
    expect_equal(response.status, "incomplete", "status")
    reason = response.incomplete_details and response.incomplete_details.reason
    expect_equal(reason, "max_output_tokens", "incomplete_details.reason")


def stream_order(target: Target) -> None:
    """Events have numbers in order, from response.created to the end, which repeats all items."""
    _events(target)


def stream_equals_response(target: Target) -> None:
    """The deltas of a stream are the text of its last event, and of the same response without streaming."""
    events = _events(target)
    text = "".join(event.delta or "" for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    expect(last is not None, "the last event must have the response")
    assert last is not None
    expect_equal(text, last.text(), "the streamed text")
    whole = _ask(target).text()
    if _ask(target, again=True).text() == whole:
        expect_equal(text, whole, "the streamed text")


def items_as_input(target: Target) -> None:
    """Messages of several roles, and instructions, are accepted."""
    items = [
        {"role": "developer", "content": "Answer in one word."},
        {"role": "user", "content": [{"type": "input_text", "text": "What is the sky?"}]},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And grass?"},
    ]
    _ask(target, input=items, instructions="You are a sailor.")


def stored(target: Target) -> None:
    """A stored response can be read, continued and deleted."""
    first = _ask(target, store=True, again=True)
    read = target.get(f"{PATH}/{first.id}")
    expect(read.status == 200, f"a stored response must be found, not {read.shown()}")
    expect_equal(read.read(Response).output, first.output, "output")
    second = _ask(target, input="Go on.", previous_response_id=first.id, again=True)
    expect_equal(second.previous_response_id, first.id, "previous_response_id")
    assert first.usage is not None
    expect(second.usage and second.usage.input_tokens > first.usage.input_tokens, "the prompt must have the first one")
    deleted = target.send("DELETE", f"{PATH}/{first.id}")
    expect(deleted.status == 200, f"a stored response must be deleted, not {deleted.shown()}")


def not_stored(target: Target) -> None:
    """A response with `store: false` cannot be read."""
    answer = target.get(f"{PATH}/{_ask(target).id}")
    expect(answer.status == 404, f"the status must be 404, not {answer.shown()}")


def function_call(target: Target) -> None:
    """A required function is called with arguments by its schema."""
    _check_calls(_ask(target, **_required()).output)


def streamed_function_call(target: Target) -> None:
    """The deltas of a streamed call are the arguments of its item."""
    events = _events(target, **_required())
    deltas = "".join(it.delta or "" for it in events if it.type == "response.function_call_arguments.delta")
    last = events[-1].response
    assert last is not None
    (call,) = _check_calls(last.output)
    expect_equal(deltas, call.arguments, "the streamed arguments")


def _required() -> dict[str, Any]:
    tool = {"type": "function", "name": "weather", "parameters": schema_of(Weather), "strict": True}
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    return {"input": _CALL, "max_output_tokens": MAX_TOKENS, **fields}


def _check_calls(output: Sequence[Item]) -> list[Item]:
    calls = [item for item in output if item.type == "function_call"]
    expect_equal([call.name for call in calls], ["weather"], "called functions")
    for call in calls:
        expect(call.call_id, "a call must have a call_id")
        read_weather(call.arguments or "")
    return calls


def function_results(target: Target) -> None:
    """A conversation continues after a call and its output."""
    items = [
        {"role": "user", "content": "What time is it?"},
        {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "12:30"},
    ]
    _ask(target, input=items)


def json_schema(target: Target) -> None:
    """With text.format `json_schema` a response follows the schema."""
    form = {"type": "json_schema", "name": "weather", "schema": schema_of(Weather), "strict": True}
    read_weather(_ask(target, input=_CALL, text={"format": form}, max_output_tokens=MAX_TOKENS).text())


def bad_requests(target: Target) -> None:
    """Bad JSON, missing and wrong fields get 400 and an error object."""
    answers = [target.send("POST", PATH, b'{"model": ')]
    answers += [
        target.post(PATH, _body(target, **fields))
        for fields in ({"input": 3}, {"max_output_tokens": "many"}, {"temperature": "hot"}, {"tools": "weather"})
    ]
    for answer in answers:
        expect(answer.status == 400, f"the status must be 400, not {answer.shown()}")
        answer.read(ErrorAnswer)


def unknown_response(target: Target) -> None:
    """A response that is not there gets 404, or 400 as the one to continue."""
    name = "resp_00000000000000000000000000000000"
    answers = [target.get(f"{PATH}/{name}"), target.post(PATH, _body(target, previous_response_id=name))]
    for answer in answers:
        expect(answer.status in (400, 404), f"the status must be 404, not {answer.shown()}")
        answer.read(ErrorAnswer)


def responses_checks() -> list[Check]:
    """Return the checks."""
    area, source = Area("responses", PATH), "OpenAI API reference: responses"
    plain = (required_fields, usage_sums, ends_at_max_tokens, items_as_input)
    calls = (function_call, streamed_function_call, function_results, json_schema)
    return [
        *(area.check(run, f"{source}, create") for run in plain),
        *(area.check(run, f"{source}, streaming") for run in (stream_order, stream_equals_response)),
        *(area.check(run, f"{source}, create, store", optional=True) for run in (stored, not_stored)),
        *(area.check(run, f"{source}, create, tools and text", optional=True) for run in calls),
        *(area.check(run, "OpenAI API reference: errors") for run in (bad_requests, unknown_response)),
    ]
