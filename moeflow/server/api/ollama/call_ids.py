"""Matches results of calls to their calls, which need no ids in Ollama's API: by the tool's name, and by order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, Final

_ALL: Final = ("all", "")


def with_call_ids(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with ids of all calls and results. Results of calls get the tool's name.

    A result belongs to the call with its id, else to the first open call of its tool. A result that names no tool
    belongs to the first open call. A result without a call stays: Ollama takes it, too.
    """
    open_calls = _OpenCalls()
    found = []
    for number, message in enumerate(messages):
        if "tool_calls" in message:
            numbered = enumerate(message["tool_calls"])
            calls = [{**call, "id": call["id"] or _made_id(number, place)} for place, call in numbered]
            open_calls.add(calls)
            message = {**message, "tool_calls": calls}
        if message["role"] == "tool":
            call = open_calls.take(message.get("tool_call_id"), message.get("name"))
            if call is None:
                message = {"tool_call_id": _made_id(number, 0), **message}
            else:
                message = {**message, "tool_call_id": call["id"], "name": call["function"]["name"]}
        found.append(message)
    return found


class _OpenCalls:
    """Calls without a result, in their order: all, those of each id, and those of each tool."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []
        self._taken: set[int] = set()  # places of calls that have their results
        self._places: dict[tuple[str, str], deque[int]] = defaultdict(deque)  # of the calls under a key

    def add(self, calls: Iterable[dict[str, Any]]) -> None:
        """Add the calls of a message."""
        for call in calls:
            for key in (("id", call["id"]), ("tool", call["function"]["name"]), _ALL):
                self._places[key].append(len(self._calls))
            self._calls.append(call)

    def take(self, call_id: str | None, tool: str | None) -> dict[str, Any] | None:
        """Return the call of a result, which has its result then."""
        by_id = None if call_id is None else self._first(("id", call_id))
        place = self._first(_ALL if tool is None else ("tool", tool)) if by_id is None else by_id
        if place is None:
            return None
        self._taken.add(place)
        return self._calls[place]

    def _first(self, key: tuple[str, str]) -> int | None:
        places = self._places.get(key) or deque()
        while places and places[0] in self._taken:
            places.popleft()
        return places[0] if places else None


def _made_id(message: int, place: int) -> str:
    """Return an id of nine digits: some chat templates take no other length."""
    return f"{message % 10**6:06}{place % 1000:03}"
