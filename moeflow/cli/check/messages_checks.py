"""Checks of Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moeflow.cli.check import anthropic_shapes as shapes
from moeflow.cli.check.area import Area, Check
from moeflow.cli.check.forms import ASK, NUM_TOKENS, convert
from moeflow.cli.check.outcome import Skipped, expect, expect_equal
from moeflow.cli.check.stream_order import MessageOrder
from moeflow.cli.check.target import Answer, Body, Target
from moeflow.cli.check.tools_checks import MAX_TOKENS, Weather, read_weather, schema_of

PATH = "/v1/messages"
_CALL = [{"role": "user", "content": "Look up the weather in Paris for 2 days."}]


def _body(target: Target, **changes: Any) -> Body:
    messages = [{"role": "user", "content": ASK}]
    return {"model": target.model, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, **changes}


def _ask(target: Target, *, again: bool = False, **changes: Any) -> shapes.Message:
    return target.ask(PATH, _body(target, **changes), shapes.Message, again=again)


def _text(message: shapes.Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, shapes.TextBlock))


def _events(target: Target, **changes: Any) -> Sequence[shapes.Event]:
    """Return the events of a stream. Raises: Failed if one has another shape, or comes at the wrong time."""
    order, events = MessageOrder(), list[shapes.Event]()
    for event in target.stream(PATH, _body(target, **changes)):
        value = event.value()
        expect_equal(event.name, value.get("type"), "the line `event:`")
        events.append(convert(value, shapes.Event))  # type: ignore[arg-type]
        order.take(value)
    order.end()
    return events


def _joined(events: Sequence[shapes.Event]) -> list[shapes.Block]:
    """Return the blocks of a stream. Raises: Failed if a part does not fit its block."""
    blocks: list[shapes.Block] = []
    inputs: dict[int, str] = {}
    for event in events:
        if isinstance(event, shapes.BlockStart):
            blocks.append(event.content_block)
        if isinstance(event, shapes.BlockDelta):
            block, delta = blocks[event.index], event.delta
            if isinstance(delta, shapes.JsonDelta):
                expect(isinstance(block, shapes.ToolUseBlock), "input_json_delta must be part of a tool_use block")
                inputs[event.index] = inputs.get(event.index, "") + delta.partial_json
            if isinstance(delta, shapes.TextDelta):
                expect(isinstance(block, shapes.TextBlock), "text_delta must be part of a text block")
                assert isinstance(block, shapes.TextBlock)
                block.text += delta.text
    for index, text in inputs.items():
        block = blocks[index]
        assert isinstance(block, shapes.ToolUseBlock)
        block.input = msgspec.to_builtins(read_weather(text)) if block.name == "weather" else block.input
    return blocks


def required_fields(target: Target) -> None:
    """A message has all required fields, of the right types."""
    message = _ask(target)
    expect(message.content or message.usage.output_tokens < 2, "a message must have content")
    expect(message.usage.prompt_tokens() > 0, "the prompt must have tokens")


def ends_at_max_tokens(target: Target) -> None:
    """A message that max_tokens ends has stop_reason `max_tokens`."""
    message = _ask(target, max_tokens=2)
    expect(message.usage.output_tokens <= 2, f"output_tokens must be at most 2, not {message.usage.output_tokens}")
    if _ask(target).usage.output_tokens > 2:
        expect_equal(message.stop_reason, "max_tokens", "stop_reason")


def ends_before_a_stop_sequence(target: Target) -> None:
    """A message ends before a stop sequence, which it names."""
    text = _repeated_text(target)
    stop = text.strip()[2:5]
    message = _ask(target, stop_sequences=[stop])
    expect_equal(_text(message), text.partition(stop)[0], f"the text before {stop!r}")
    expect_equal((message.stop_reason, message.stop_sequence), ("stop_sequence", stop), "stop_reason and stop_sequence")


def system(target: Target) -> None:
    """System text is part of the prompt, as text and as blocks alike."""
    text = "You are a sailor."
    plain, as_text, as_blocks = (
        _ask(target, max_tokens=1, **fields).usage.prompt_tokens()
        for fields in ({}, {"system": text}, {"system": [{"type": "text", "text": text}]})
    )
    expect_equal(as_blocks, as_text, "tokens of the prompt with system blocks")
    expect(as_text != plain, "system must change the prompt")


def stream_order(target: Target) -> None:
    """Events go from message_start to message_stop, each block within its start and stop."""
    expect(_events(target), "a stream must have events")


def stream_equals_message(target: Target) -> None:
    """The blocks of a stream and its end are those of the same message without streaming."""
    text = _repeated_text(target)
    events = _events(target)
    found = "".join(block.text for block in _joined(events) if isinstance(block, shapes.TextBlock))
    expect_equal(found, text, "the streamed text")
    (end,) = (event for event in events if isinstance(event, shapes.MessageDelta))
    whole = _ask(target)
    expect_equal(end.delta.stop_reason, whole.stop_reason, "stop_reason")
    expect_equal(end.usage.output_tokens, whole.usage.output_tokens, "output_tokens")


def tool_use(target: Target) -> None:
    """A forced tool is called with an input by its schema, and ends the message with `tool_use`."""
    message = _ask(target, **_forced())
    calls = [block for block in message.content if isinstance(block, shapes.ToolUseBlock)]
    expect_equal([call.name for call in calls], ["weather"], "called tools")
    convert(calls[0].input, Weather)
    expect_equal(message.stop_reason, "tool_use", "stop_reason")


def streamed_tool_use(target: Target) -> None:
    """The parts of a streamed call are an input by its schema."""
    calls = [block for block in _joined(_events(target, **_forced())) if isinstance(block, shapes.ToolUseBlock)]
    expect_equal([call.name for call in calls], ["weather"], "called tools")
    convert(calls[0].input, Weather)


def _forced() -> dict[str, Any]:
    tool = {"name": "weather", "description": "Looks up weather.", "input_schema": schema_of(Weather)}
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    return {"messages": _CALL, "tools": [tool], "tool_choice": choice, "max_tokens": MAX_TOKENS}


def tool_result(target: Target) -> None:
    """A conversation continues after a call and its result."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12:30"}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    tool = {"name": "clock", "description": "Tells the time.", "input_schema": {"type": "object", "properties": {}}}
    _ask(target, messages=messages, tools=[tool], max_tokens=8)


def count_tokens(target: Target) -> None:
    """`count_tokens` counts more tokens for more text."""
    counts = [
        target.ask(
            f"{PATH}/count_tokens",
            {"model": target.model, "messages": [{"role": "user", "content": text}]},
            shapes.TokenCount,
        ).input_tokens
        for text in ("Hello", "Hello " * 50)
    ]
    expect(0 < counts[0] < counts[1], f"the counts must increase from above 0, not be {counts}")


def _check_refusal(answer: Answer, status: int, kind: str) -> None:
    expect(answer.status == status, f"the status must be {status}, not {answer.shown()}")
    expect_equal(answer.read(shapes.ErrorAnswer).error.type, kind, "error.type")


def bad_requests(target: Target) -> None:
    """Bad JSON, missing and wrong fields get 400 and `invalid_request_error`."""
    _check_refusal(target.send("POST", PATH, b'{"model": '), 400, "invalid_request_error")
    without = {name: value for name, value in _body(target).items() if name != "max_tokens"}
    bodies = [without, _body(target, max_tokens="many"), _body(target, messages=[]), _body(target, temperature="hot")]
    for body in bodies:
        _check_refusal(target.post(PATH, body), 400, "invalid_request_error")


def unknown_model(target: Target) -> None:
    """A model that is not there gets 404 and `not_found_error`."""
    _check_refusal(target.post(PATH, _body(target, model="no-such-model")), 404, "not_found_error")


def wrong_key(target: Target) -> None:
    """A wrong key in `x-api-key` gets 401 and `authentication_error`."""
    body = msgspec.json.encode(_body(target, max_tokens=1))
    answer = target.send("POST", PATH, body, {"x-api-key": "wrong-key"})
    if answer.status == 200:
        raise Skipped("the server needs no key")
    _check_refusal(answer, 401, "authentication_error")


def too_large(target: Target) -> None:
    """A request of more than 32 MB gets 413 and `request_too_large`."""
    body = b'{"messages": ' + b" " * (33 << 20) + b"1}"
    _check_refusal(target.send("POST", PATH, body), 413, "request_too_large")


def _repeated_text(target: Target) -> str:
    """Return a text that the server gives every time. Raises: Skipped if it has none."""
    text = _text(_ask(target))
    if len(text.strip()) < 6:
        raise Skipped(f"the message has too little text: {text!r}")
    if _text(_ask(target, again=True)) != text:
        raise Skipped("the server gives another text each time")
    return text


def messages_checks() -> list[Check]:
    """Return the checks."""
    area, source = Area("messages", PATH), "Anthropic API reference: messages"
    plain = (required_fields, ends_at_max_tokens, ends_before_a_stop_sequence, system)
    streams = (stream_order, stream_equals_message)
    calls = (tool_use, streamed_tool_use, tool_result)
    refusals = (bad_requests, unknown_model, wrong_key, too_large)
    return [
        *(area.check(run, f"{source}, create") for run in plain),
        *(area.check(run, f"{source}, streaming") for run in streams),
        *(area.check(run, f"{source}, tools", optional=True) for run in calls),
        area.check(count_tokens, f"{source}, count tokens", optional=True),
        *(area.check(run, "Anthropic API reference: errors") for run in refusals),
    ]
