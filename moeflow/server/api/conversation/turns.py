"""Assembles messages for chat templates, from APIs that split them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeflow.core.errors import RequestError
from moeflow.text.past_calls import PLACE


def named_results(messages: Sequence[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Return a conversation with the function's name in each result of a call.

    Raises: RequestError about `field` if no earlier message makes the call of a result.
    """
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            if call_id not in names:
                raise RequestError(
                    f"there is a result of the call {call_id[:80]!r}, but no earlier message makes this call; "
                    "send the message with the call, too, or leave out its result",
                    param=field,
                )
            message = {"name": names[call_id], **message}
        named.append(message)
    return named


class Turns:
    """A conversation, written piece by piece. What the model said, thought and called in one answer is one message."""

    def __init__(self) -> None:
        self.place: str | None = None  # of the piece that comes next in the request, for errors about a call
        self._messages: list[dict[str, Any]] = []

    def conversation(self, field: str) -> list[dict[str, Any]]:
        """Return the messages. Raises: RequestError about `field`; see `named_results`."""
        return named_results(self._messages, field)

    def say(self, role: str, text: str) -> None:
        """Add a message. What the system says twice in a row is one message, as some templates take no second."""
        if role == "assistant":
            turn = self._answer(is_next=True)
            turn["content"] += text
        elif role == "system" and self._messages and self._messages[-1]["role"] == role:
            self._messages[-1]["content"] += f"\n\n{text}"
        else:
            self._messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Add reasoning of the model's."""
        turn = self._answer(is_next=True)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call; `arguments` are JSON."""
        turn = self._answer(is_next=False)
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call if self.place is None else {**call, PLACE: self.place})

    def result(self, call_id: str, text: str) -> None:
        """Add what a call returned."""
        self._messages.append({"role": "tool", "content": text, "tool_call_id": call_id})

    def _answer(self, *, is_next: bool) -> dict[str, Any]:
        """Return the answer to add to. One that has text and no calls is over where something else `is_next`."""
        last = self._messages[-1] if self._messages else None
        is_over = last is None or last["role"] != "assistant"
        if last is None or is_over or (is_next and last["content"] and "tool_calls" not in last):
            last = {"role": "assistant", "content": ""}
            self._messages.append(last)
        return last
