"""Results find their calls: by id, by the tool's name, by order."""

from __future__ import annotations

import pytest

from moeflow.server.api.ollama.call_ids import with_call_ids

ASSISTANT = "assistant"


def calls(*named: tuple[str, str | None]) -> dict:
    listed = [{"id": call_id, "type": "function", "function": {"name": name}} for name, call_id in named]
    return {"role": ASSISTANT, "content": "", "tool_calls": listed}


def result(**fields: str) -> dict:
    return {"role": "tool", "content": "x", **fields}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([calls(("a", None), ("b", None)), result(), result()], ["a0", "b1"]),
        ([calls(("a", None), ("b", None)), result(name="b"), result()], ["b1", "a0"]),
        ([calls(("a", None), ("a", None)), result(name="a"), result(name="a")], ["a0", "a1"]),
        ([calls(("a", "x"), ("b", "y")), result(tool_call_id="y"), result(tool_call_id="x")], ["b1", "a0"]),
        ([calls(("a", None)), result(tool_call_id="lost", name="a")], ["a0"]),
        ([calls(("a", None), ("b", None)), result(name="b"), result(name="b")], ["b1", None]),
        ([result(name="c")], [None]),
    ],
    ids=["order", "name", "same name", "id", "unknown id", "one too many", "no call"],
)
def test_each_result_finds_its_call(messages, expected):
    found = with_call_ids(messages)
    made = {call["id"]: call["function"]["name"] for message in found for call in message.get("tool_calls", ())}
    assert len(made) == sum(len(message.get("tool_calls", ())) for message in messages)
    places = {call_id: f"{name}{place}" for place, (call_id, name) in enumerate(made.items())}
    results = [message for message in found if message["role"] == "tool"]
    assert [places.get(message["tool_call_id"]) for message in results] == expected
    for message, place in zip(results, expected, strict=True):
        assert place is None or message["name"] == place[0]


def test_made_ids_differ_and_have_nine_digits():
    """Mistral's templates take no other length."""
    found = with_call_ids([calls(("a", None), ("a", None)), calls(("a", None)), result(), result(), result()])
    made = [call["id"] for message in found[:2] for call in message["tool_calls"]]
    assert len({*made}) == 3
    assert all(call_id.isdecimal() and len(call_id) == 9 for call_id in made)
    assert [message["tool_call_id"] for message in found[2:]] == made
