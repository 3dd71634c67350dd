"""Replays the stream of a stored response: each text in one piece, all else unchanged."""

from __future__ import annotations

from itertools import count
from typing import Any

from moeflow.server.api.responses.response_output import ResponseOutput
from moeflow.server.api.responses.written_calls import called_as, written_arguments
from moeflow.server.sse import named_event
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Reasoning


def replayed_events(response: dict[str, Any], starting_after: int) -> bytes:
    """Return the events of a response that has ended, behind the one of this number."""
    events = bytearray()
    numbers = count()

    def emit(kind: str, /, **fields: Any) -> None:
        number = next(numbers)
        if number > starting_after:
            events.extend(named_event({"type": kind, "sequence_number": number, **fields}))

    begun = {**response, "status": "in_progress", "output": []}
    begun |= dict.fromkeys(("completed_at", "incomplete_details", "usage"))
    emit("response.created", response=begun)
    emit("response.in_progress", response=begun)
    output = response["output"]
    ids = iter([item["id"] for item in output])
    calls = [item for item in output if "call_id" in item]
    call_ids, called = iter([item["call_id"] for item in calls]), iter([called_as(item) for item in calls])
    items = ResponseOutput(
        lambda: next(call_ids),
        emit,
        lambda _: next(ids),
        called=lambda _: next(called),
        seals_reasoning=any(item.get("encrypted_content") for item in output),
    )
    for item in output:
        _write(items, item)
        items.close(item["status"])
    emit(f"response.{response['status']}", response=response)
    return bytes(events)


def _write(items: ResponseOutput, item: dict[str, Any]) -> None:
    match item["type"]:
        case "message":
            (part,) = item["content"]
            items.take(Content(part["text"]), part["logprobs"])
        case "reasoning":
            (part,) = item["content"]
            items.take(Reasoning(part["text"]))
        case _:
            items.take(CallBegun(item.get("name", "")))
            if arguments := written_arguments(item):
                items.take(Arguments(arguments))
