"""The order of a stream's events, as OpenAI and Anthropic document it. Each class takes the events of one stream."""

from __future__ import annotations

from typing import Any, Protocol

from moeflow.cli.check.outcome import expect


class StreamOrder(Protocol):
    """Takes the events of a stream, one after the other."""

    def take(self, event: dict[str, Any]) -> None:
        """Raise if this event must not come now."""

    def end(self) -> None:
        """Raise if the stream must not end now."""


class ChunkOrder:
    """Chunks of completions, or of chat: a role for each choice first, a reason to end last, the usage behind all."""

    def __init__(self, *, is_chat: bool, with_usage: bool) -> None:
        self._is_chat = is_chat
        self._with_usage = with_usage
        self._head: tuple[Any, ...] | None = None
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._has_usage = False

    def take(self, event: dict[str, Any]) -> None:
        """Raise if this chunk must not come now."""
        expect(not self._has_usage, "only [DONE] may follow the chunk with the usage")
        head = (event["id"], event["object"], event["created"], event["model"])
        self._head = self._head or head
        expect(head == self._head, f"all chunks must have the same id, object, created and model: {self._head}, {head}")
        if not event["choices"]:
            expect(event.get("usage") is not None, "a chunk without choices must have the usage")
            expect(self._begun == self._ended, "the usage must follow all choices")
            self._has_usage = True
        for choice in event["choices"]:
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        expect(index not in self._ended, "no part of a choice may follow its finish_reason")
        if self._is_chat and index not in self._begun:
            expect(choice["delta"].get("role") == "assistant", "the first chunk of a choice must have the role")
        self._begun.add(index)
        if choice.get("finish_reason") is not None:
            self._ended.add(index)

    def end(self) -> None:
        """Raise if `[DONE]` must not come now."""
        expect(self._begun, "a stream must have a choice")
        expect(self._begun == self._ended, "every choice must end with a finish_reason")
        expect(self._has_usage == self._with_usage, "a last chunk must have the usage if the request asks for it")


class ResponseOrder:
    """Events of a response, or the last ones of it: numbered, up to its end, which repeats all items."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._items: list[Any] = []
        self._is_over = False

    def take(self, event: dict[str, Any]) -> None:
        """Raise if this event must not come now."""
        number, kind = event["sequence_number"], event["type"]
        expect(not self._is_over, "no event may follow the end of the response")
        expect(self._number is None or number == self._number + 1, f"{number} must not follow number {self._number}")
        self._number = number
        if number < 2 and kind != "error":
            wanted = ("response.created", "response.in_progress")[number]
            expect(kind == wanted, f"event {number} must be {wanted}, not {kind}")
            expect(event["response"]["status"] == "in_progress", "a response that begins must be in progress")
        if kind == "response.output_item.done":
            self._items.append(event["item"])
        if kind in ("response.completed", "response.incomplete", "response.failed", "error"):
            self._is_over = True
        if kind in ("response.completed", "response.incomplete") and self._items:
            last = event["response"]["output"][-len(self._items) :]
            expect(last == self._items, "the last event must repeat all items")

    def end(self) -> None:
        """Raise if the stream must not end now. One without events begins behind the last event."""
        expect(self._number is None or self._is_over, "the last event must end the response")


class MessageOrder:
    """Events of a message: its start, one block after the other, the reason to stop, and the stop."""

    def __init__(self) -> None:
        self._stage = "before"
        self._num_blocks = 0
        self._is_block_open = False

    def take(self, event: dict[str, Any]) -> None:
        """Raise if this event must not come now."""
        kind = event["type"]
        if kind == "ping":
            return
        expect(self._stage != "over", "no event may follow the end of the message")
        if kind == "error":
            self._stage = "over"
        elif kind in _STAGES:
            before, after = _STAGES[kind]
            expect(self._stage == before and not self._is_block_open, f"{kind} comes at the wrong time")
            self._stage = after
        else:
            self._take_block(kind, event["index"])

    def _take_block(self, kind: str, index: int) -> None:
        expect(self._stage == "content", f"{kind} must follow message_start")
        expect(index == self._num_blocks, f"the index must be {self._num_blocks}, not {index}")
        expect(self._is_block_open == (kind != "content_block_start"), f"{kind} comes at the wrong time")
        self._is_block_open = kind != "content_block_stop"
        self._num_blocks += kind == "content_block_stop"

    def end(self) -> None:
        """Raise if the stream must not end now."""
        expect(self._stage == "over", "the last event must be message_stop or an error")


_STAGES = {  # of events that are of no block: the stage before, and the one after
    "message_start": ("before", "content"),
    "message_delta": ("content", "stopping"),
    "message_stop": ("stopping", "over"),
}
