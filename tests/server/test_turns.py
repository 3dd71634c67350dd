"""Conversations that come in pieces: which of these are one message."""

from __future__ import annotations

import pytest

from moeflow.core.errors import RequestError
from moeflow.server.api.conversation.turns import Turns

TEXT, MORE, THOUGHT, CALL, OTHER, RESULT, USER, SYSTEM = (
    ("say", "assistant", "A"),
    ("say", "assistant", "B"),
    ("think", "hm"),
    ("call", "1", "look", "{}"),
    ("call", "2", "go", "{}"),
    ("result", "1", "found"),
    ("say", "user", "U"),
    ("say", "system", "S"),
)


def call(name: str, call_id: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def answer(content: str = "", *calls: dict, thought: str = "") -> dict:
    others = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": content} | others | ({"tool_calls": [*calls]} if calls else {})


LOOK, GO = call("look", "1"), call("go", "2")
FOUND = {"role": "tool", "content": "found", "tool_call_id": "1", "name": "look"}


@pytest.mark.parametrize(
    ("pieces", "messages"),
    [
        ([THOUGHT, TEXT, CALL, OTHER, RESULT], [answer("A", LOOK, GO, thought="hm"), FOUND]),
        ([CALL, TEXT], [answer("A", LOOK)]),
        ([TEXT, CALL, MORE, THOUGHT], [answer("AB", LOOK, thought="hm")]),
        ([TEXT, MORE], [answer("A"), answer("B")]),
        ([TEXT, THOUGHT, CALL], [answer("A"), answer("", LOOK, thought="hm")]),
        ([THOUGHT, THOUGHT, TEXT], [answer("A", thought="hmhm")]),
        ([CALL, RESULT, OTHER], [answer("", LOOK), FOUND, answer("", GO)]),
        ([TEXT, USER, MORE], [answer("A"), {"role": "user", "content": "U"}, answer("B")]),
        ([SYSTEM, SYSTEM, USER], [{"role": "system", "content": "S\n\nS"}, {"role": "user", "content": "U"}]),
        ([USER, SYSTEM], [{"role": "user", "content": "U"}, {"role": "system", "content": "S"}]),
        ([], []),
    ],
)
def test_pieces_of_one_answer_are_one_message(pieces, messages):
    turns = Turns()
    for name, *given in pieces:
        getattr(turns, name)(*given)
    assert turns.conversation("input") == messages


@pytest.mark.parametrize("pieces", [[RESULT], [OTHER, RESULT], [RESULT, CALL]])
def test_a_result_of_no_earlier_call_is_refused_by_name(pieces):
    turns = Turns()
    for name, *given in pieces:
        getattr(turns, name)(*given)
    with pytest.raises(
        RequestError, match="a result of the call '1', but no earlier message makes this call"
    ) as caught:
        turns.conversation("input")
    assert caught.value.param == "input"
