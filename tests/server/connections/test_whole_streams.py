"""One stream with all that a chat can have: choices, reasoning, text, calls, log-probabilities and the usage."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.server.conftest import connect
from tests.server.events import read_events
from tests.server.test_tools import ASK, TOOLS
from tests.server.thinking_model import thinking_model
from tests.tiny_mixtral import EOS

pytestmark = pytest.mark.anyio

TEXT = '<think>\nHm, ü.\n</think>\n\nLet me see.[TOOL_CALLS]look[ARGS]{"q": "fox"}[TOOL_CALLS]go[ARGS]{}'
EVERYTHING = {
    "messages": ASK,
    "tools": TOOLS,
    "n": 3,
    "logprobs": True,
    "top_logprobs": 2,
    "max_tokens": 500,
}


def gathered(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message and log-probabilities of one choice's parts, as a client adds them up."""
    message: dict[str, Any] = {}
    tokens: list[Any] = []
    for choice in choices:
        tokens += (choice["logprobs"] or {}).get("content") or []
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message[name] + value if message.get(name) else value
            for call in value if name == "tool_calls" else ():
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({key: copy.copy(part) for key, part in call.items() if key != "index"})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "logprobs": tokens, "finish_reason": choices[-1]["finish_reason"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


@pytest.mark.parametrize("drafts_per_pass", [0, 3])
async def test_a_stream_of_everything_adds_up_to_the_whole_answer(drafts_per_pass):
    app, engine, tokenizer = thinking_model()
    engine.reply = [*tokenizer.encode(TEXT, add_special_tokens=False), EOS]
    engine.drafts_per_pass = drafts_per_pass
    async with connect(app) as http:
        whole = (await http.post("/v1/chat/completions", json=EVERYTHING)).json()
        streamed = EVERYTHING | {"stream": True, "stream_options": {"include_usage": True}}
        chunks = read_events((await http.post("/v1/chat/completions", json=streamed)).text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert {chunk["usage"] for chunk in chunks[:-1]} == {None}
    parts: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        parts.setdefault(choice["index"], []).append(choice)
    assert sorted(parts) == [0, 1, 2]
    for choice in whole["choices"]:
        mine = parts[choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert (mine[-1]["delta"], mine[-1]["finish_reason"]) == ({}, "tool_calls")
        found = gathered(mine)
        assert without_ids(found["message"]) == without_ids(choice["message"])
        assert found["logprobs"] == choice["logprobs"]["content"]
        assert found["message"]["reasoning_content"] == "Hm, ü."
        assert [call["function"]["name"] for call in found["message"]["tool_calls"]] == ["look", "go"]
    ids = [call["id"] for mine in parts.values() for call in gathered(mine)["message"]["tool_calls"]]
    assert len(set(ids)) == 6
