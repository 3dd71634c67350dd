"""Matches results of calls to their calls, which need no ids in Ollama's API: by the tool's name, and by order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def with_call_ids(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with ids of all calls and results. Results of calls get the tool's name.

    A result belongs to the call with its id, else to the first open call of its tool. A result that names no tool
    belongs to the first open call. A result without a call stays: Ollama takes it, too.
    """
    open_calls: list[dict[str, Any]] = []
    found = []
    for number, message in enumerate(messages):
        if "tool_calls" in message:
            numbered = enumerate(message["tool_calls"])
            calls = [{**call, "id": call["id"] or _made_id(number, place)} for place, call in numbered]
            open_calls += calls
            message = {**message, "tool_calls": calls}
        if message["role"] == "tool":
            call = _call_of(message, open_calls)
            open_calls = [other for other in open_calls if other is not call]
            if call is None:
                message = {"tool_call_id": _made_id(number, 0), **message}
            else:
                message = {**message, "tool_call_id": call["id"], "name": call["function"]["name"]}
        found.append(message)
    return found


def _call_of(result: dict[str, Any], open_calls: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    same_id = [call for call in open_calls if call["id"] == result.get("tool_call_id")]
    same_tool = [call for call in open_calls if result.get("name") in (None, call["function"]["name"])]
    return next(iter(same_id or same_tool), None)


def _made_id(message: int, place: int) -> str:
    """Return an id of nine digits: some chat templates take no other length."""
    return f"{message % 10**6:06}{place % 1000:03}"
