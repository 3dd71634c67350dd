"""The order of a stream's events, as OpenAI and Anthropic document it. Each class takes the events of one stream."""

from __future__ import annotations

from typing import Any, Protocol


class StreamOrder(Protocol):
    """Takes the events of a stream, one after the other."""

    def take(self, event: dict[str, Any]) -> None:
        """Raise if this event must not come now."""

    def take_done(self) -> None:
        """Raise if `[DONE]` must not come now."""

    def end(self) -> None:
        """Raise if the stream must not end now."""


class ChunkOrder:
    """Chunks of completions, or of chat: a role for each choice first, a reason to end last, the usage behind all."""

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._head: tuple[Any, ...] | None = None
        self._has_usage_field: bool | None = None
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._is_over = False
        self._may_end = False

    def take(self, event: dict[str, Any]) -> None:
        """Raise if this chunk must not come now."""
        assert not self._is_over, "nothing but [DONE] follows the usage, and nothing an error"
        if "error" in event:
            self._is_over = self._may_end = True
            return
        head = (event["id"], event["object"], event["created"], event["model"])
        self._head = self._head or head
        assert head == self._head, "all chunks have the same head"
        if self._has_usage_field is None:
            self._has_usage_field = "usage" in event
        assert self._has_usage_field == ("usage" in event), "all chunks have the field usage, or none"
        if not event["choices"]:
            assert event["usage"] is not None
            assert self._begun == self._ended, "the usage comes behind all choices"
            self._is_over = True
            return
        assert event.get("usage") is None, "only the last chunk has counts"
        for choice in event["choices"]:
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        assert index not in self._ended, "nothing follows the reason to end"
        if self._is_chat:
            is_first = index not in self._begun
            assert ("role" in choice["delta"]) == is_first, "the first chunk of a choice, and no other, has the role"
            assert choice["finish_reason"] is None or not choice["delta"], "the reason to end stands alone"
        self._begun.add(index)
        if choice["finish_reason"] is not None:
            self._ended.add(index)

    def take_done(self) -> None:
        """Raise if `[DONE]` must not come now."""
        assert not self._may_end, "nothing follows [DONE] or an error"
        assert self._begun
        assert self._begun == self._ended, "every choice has a reason to end"
        assert self._is_over == bool(self._has_usage_field), "the counts are there if there is a field for them"
        self._is_over = self._may_end = True

    def end(self) -> None:
        """Raise if the stream must not end now."""
        assert self._may_end, "the last event is [DONE] or an error"


class ResponseOrder:
    """Events of a response, or the last ones of it: numbered, up to its end, which repeats all items."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._items: list[Any] = []
        self._is_over = False

    def take(self, event: dict[str, Any]) -> None:
        """Raise if this event must not come now."""
        number, kind = event["sequence_number"], event["type"]
        assert not self._is_over, "nothing follows the end"
        assert self._number is None or number == self._number + 1, "numbers are in order"
        self._number = number
        if number < 2 and kind != "error":
            assert kind == ("response.created", "response.in_progress")[number]
            assert event["response"]["status"] == "in_progress"
        if kind == "response.output_item.done":
            self._items.append(event["item"])
        if kind in ("response.completed", "response.incomplete", "response.failed", "error"):
            self._is_over = True
        if kind in ("response.completed", "response.incomplete") and self._items:
            assert event["response"]["output"][-len(self._items) :] == self._items

    def take_done(self) -> None:
        """Raise: these streams have no `[DONE]`."""
        raise AssertionError("a stream of a response has no [DONE]")

    def end(self) -> None:
        """Raise if the stream must not end now. One without events begins behind the last event."""
        assert self._number is None or self._is_over, "the last event is that of the response's end"


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
        assert self._stage != "over", "nothing follows the end"
        if kind == "error":
            self._stage = "over"
        elif kind == "message_start":
            assert self._stage == "before"
            self._stage = "content"
        elif kind == "message_delta":
            assert self._stage == "content"
            assert not self._is_block_open
            self._stage = "stopping"
        elif kind == "message_stop":
            assert self._stage == "stopping"
            self._stage = "over"
        else:
            self._take_block(kind, event["index"])

    def _take_block(self, kind: str, index: int) -> None:
        assert self._stage == "content"
        assert index == self._num_blocks, "blocks come one after the other"
        assert self._is_block_open == (kind != "content_block_start")
        self._is_block_open = kind != "content_block_stop"
        self._num_blocks += kind == "content_block_stop"

    def take_done(self) -> None:
        """Raise: these streams have no `[DONE]`."""
        raise AssertionError("a stream of a message has no [DONE]")

    def end(self) -> None:
        """Raise if the stream must not end now."""
        assert self._stage == "over", "the last event is message_stop or an error"


def order_of(path: str) -> StreamOrder:
    """Return what the events of a path's streams have to keep to."""
    if path == "/v1/messages":
        return MessageOrder()
    if path.startswith("/v1/responses"):
        return ResponseOrder()
    return ChunkOrder(is_chat=path == "/v1/chat/completions")
