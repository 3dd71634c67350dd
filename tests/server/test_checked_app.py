"""The checks of every answer notice what official clients would stumble over: true streams with one mistake each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from tests.server.conftest import CheckingClient, connect
from tests.server.fake_client import NAME

pytestmark = pytest.mark.anyio

ASK = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASK | {"n": 2, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 100},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": ASK | {"max_tokens": 100, "model": NAME},
}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = BODIES
Events = list[Any]  # of a stream, decoded


def at(place: int, change: Callable[[Any], Any]) -> Callable[[Events], Events]:
    """Change the event at a place."""
    return lambda events: [*events[:place], change(events[place]), *events[place:][1:]]


def without(place: int) -> Callable[[Events], Events]:
    """Leave out the event at a place."""
    return lambda events: [event for number, event in enumerate(events) if number != place % len(events)]


def swapped(place: int) -> Callable[[Events], Events]:
    """Exchange an event and the one behind it."""
    return lambda events: [*events[:place], events[place + 1], events[place], *events[place:][2:]]


def first_choice(**changes: Any) -> Callable[[Any], Any]:
    return lambda chunk: chunk | {"choices": [chunk["choices"][0] | changes]}


def no_field(name: str) -> Callable[[Any], Any]:
    return lambda chunk: {key: value for key, value in chunk.items() if key != name}


MISTAKES: dict[str, tuple[str, Callable[[Events], Events], str]] = {
    "a field is missing": (
        CHAT,
        at(3, no_field("created")),
        "missing",
    ),
    "a number is text": (CHAT, at(3, lambda chunk: chunk | {"created": str(chunk["created"])}), "int_type"),
    "a field is unknown": (CHAT, at(3, lambda chunk: chunk | {"strange": 1}), "does not know"),
    "a choice has no role": (CHAT, without(0), "must have the role"),
    "a choice has no end": (CHAT, without(-2), "must follow all choices"),
    "a reason comes with text": (CHAT, at(3, first_choice(finish_reason="stop")), "stands alone"),
    "the usage is missing": (CHAT, without(-1), "must have the usage"),
    "the usage comes early": (CHAT, swapped(-2), "must follow all choices"),
    "one chunk has no field for it": (
        CHAT,
        at(3, no_field("usage")),
        "or none",
    ),
    "another id": (COMPLETIONS, at(3, lambda chunk: chunk | {"id": "other"}), "must have the same id"),
    "text after the end": (COMPLETIONS, lambda events: [*events, events[1]], "may follow its finish_reason"),
    "an unknown reason": (COMPLETIONS, at(-1, first_choice(finish_reason="eos")), "literal_error"),
    "a number is left out": (RESPONSES, without(4), "must not follow number"),
    "it begins with nothing": (
        RESPONSES,
        at(0, lambda event: event | {"type": "response.in_progress"}),
        "must be response.created",
    ),
    "no end": (MESSAGES, swapped(-2), "wrong time"),
    "a block that is not open": (MESSAGES, without(2), "wrong time|index must"),
    "an item is forgotten": (
        RESPONSES,
        at(-1, lambda event: event | {"response": event["response"] | {"output": []}}),
        "must repeat all items",
    ),
    "the response has no end": (RESPONSES, without(-1), "must end the response"),
    "the message has no end": (MESSAGES, without(-1), "message_stop"),
    "an unknown event": (MESSAGES, at(1, lambda event: {"type": "pong"}), "pong"),
}


def decoded(body: str) -> Events:
    """Return the events of a true stream."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def encoded(path: str, events: Events) -> str:
    """Return a stream."""
    names = [f"event: {event['type']}\n" if path in (RESPONSES, MESSAGES) else "" for event in events]
    body = "".join(f"{name}data: {json.dumps(event)}\n\n" for name, event in zip(names, events, strict=True))
    return body + ("data: [DONE]\n\n" if path in (CHAT, COMPLETIONS) else "")


async def answer(path: str, response: Response) -> None:
    """Have a checked application answer so."""
    async with CheckingClient(response) as http:
        await http.post(path)


@pytest.mark.parametrize("name", MISTAKES)
async def test_a_mistake_in_a_stream_is_found(app, name):
    path, spoil, reason = MISTAKES[name]
    async with connect(app) as http:
        events = decoded((await http.post(path, json=BODIES[path] | {"stream": True})).text)
    await answer(path, Response(encoded(path, events), media_type="text/event-stream"))
    with pytest.raises(AssertionError, match=reason):
        await answer(path, Response(encoded(path, spoil(events)), media_type="text/event-stream"))


async def test_a_stream_of_chunks_ends_with_done_or_an_error(app):
    async with connect(app) as http:
        whole = (await http.post(CHAT, json=BODIES[CHAT] | {"stream": True})).text
    error = encoded(CHAT, [{"error": {"message": "m", "type": "server_error", "param": None, "code": "c"}}])
    cut, done = whole.removesuffix("data: [DONE]\n\n"), "data: [DONE]\n\n"
    await answer(CHAT, Response(error.removesuffix(done), media_type="text/event-stream"))
    for wrong in (cut, whole + done, error):
        with pytest.raises(AssertionError, match=r"\[DONE\]"):
            await answer(CHAT, Response(wrong, media_type="text/event-stream"))


@pytest.mark.parametrize("body", ["data: {}\n", "data: 1\ndata: 2\n\n", "\n\n", "dat: 1\n\n", 'data: "\u2028"\n\n'])
async def test_what_is_no_event_is_found(body):
    with pytest.raises(AssertionError):
        await answer(CHAT, Response(body, media_type="text/event-stream"))


@pytest.mark.parametrize("path", BODIES)
async def test_a_mistake_in_a_whole_answer_is_found(app, path):
    async with connect(app) as http:
        whole = (await http.post(path, json=BODIES[path] | {"stream": False, "stream_options": None})).json()
    await answer(path, Response(json.dumps(whole), media_type="application/json"))
    for changes in ({"id": 5}, {"strange": 5}):
        with pytest.raises(AssertionError):
            await answer(path, Response(json.dumps(whole | changes), media_type="application/json"))


@pytest.mark.parametrize("path", BODIES)
async def test_a_mistake_in_an_error_is_found(app, path):
    async with connect(app) as http:
        refused: httpx.Response = await http.post(path, json={"temperature": -5})
    await answer(path, Response(refused.text, 400, media_type="application/json"))
    with pytest.raises(AssertionError):
        await answer(path, Response(json.dumps({"detail": "Field required"}), 400, media_type="application/json"))
