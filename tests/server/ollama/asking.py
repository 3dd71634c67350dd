"""Requests of Ollama's API, and what to compare of the answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx

from tests.server.fake_client import NAME

ASK = [{"role": "user", "content": "Which fox?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks it up.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    },
    {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}},
]
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a complete stream."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.split("\n")[:-1]]


def joined(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream of `/api/chat`: the last line, with the message of all lines."""
    lines = [json.loads(json.dumps(line)) for line in lines]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    messages = [line["message"] for line in lines]
    whole: dict[str, Any] = {"role": "assistant", "content": "".join(message["content"] for message in messages)}
    if thinking := "".join(message.get("thinking") or "" for message in messages):
        whole["thinking"] = thinking
    if calls := [call for message in messages for call in message.get("tool_calls") or ()]:
        whole["tool_calls"] = calls
    return {**lines[-1], "message": whole}


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from run to run."""
    assert all(answer[name] > 0 for name in TIMES)
    kept = {name: value for name, value in answer.items() if name not in (*TIMES, "created_at")}
    for call in kept.get("message", {}).get("tool_calls", ()):
        assert call.pop("id")
    return kept


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": ASK, **changes}
