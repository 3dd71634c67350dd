"""Reads server-sent events as the format has it."""

from __future__ import annotations

import json
from typing import Any


def read_events(body: str) -> list[dict[str, Any]]:
    """The chunks of a complete stream: every event is one `data:` line, the last is [DONE]."""
    *events, rest = body.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    *chunks, last = (event.removeprefix("data: ") for event in events)
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def read_broken_events(body: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The chunks of a stream that failed, and the error at its end."""
    *chunks, error = [json.loads(event.removeprefix("data: ")) for event in body.split("\n\n")[:-1]]
    return chunks, error["error"]


def read_typed_events(body: str) -> list[dict[str, Any]]:
    """The events of a stream with names; each name is the event's type."""
    *events, rest = body.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
