"""The order of a stream's events: that of `moeflow check`, and what only the server of moeflow promises."""

from __future__ import annotations

from typing import Any

from moeflow.cli.check.stream_order import ChunkOrder, MessageOrder, ResponseOrder, StreamOrder


class OurOrder:
    """Takes the events of one stream, `[DONE]` and its end."""

    def __init__(self, order: StreamOrder) -> None:
        self._order = order

    def take(self, event: dict[str, Any]) -> None:
        """Raise if this event must not come now."""
        self._order.take(event)

    def take_done(self) -> None:
        """Raise: most streams have no `[DONE]`."""
        raise AssertionError("this stream has no [DONE]")

    def end(self) -> None:
        """Raise if the stream must not end now."""
        self._order.end()


class OurChunkOrder(OurOrder):
    """Chunks, one role for each choice, a field `usage` in all of them or in none, and then `[DONE]` or an error."""

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._begun: set[int] = set()
        self._has_usage_field: bool | None = None
        self._may_end = False
        super().__init__(ChunkOrder(is_chat=is_chat, with_usage=False))

    def take(self, event: dict[str, Any]) -> None:
        """Raise if this chunk must not come now."""
        assert not self._may_end, "nothing follows [DONE] or an error"
        if "error" in event:
            self._may_end = True
            return
        if self._has_usage_field is None:
            self._has_usage_field = "usage" in event
            self._order = ChunkOrder(is_chat=self._is_chat, with_usage=self._has_usage_field)
        assert self._has_usage_field == ("usage" in event), "all chunks have the field usage, or none"
        assert not event["choices"] or event.get("usage") is None, "only the last chunk has counts"
        self._order.take(event)
        for choice in event["choices"] if self._is_chat else ():
            is_first = choice["index"] not in self._begun
            assert ("role" in choice["delta"]) == is_first, "the first chunk of a choice, and no other, has the role"
            assert choice["finish_reason"] is None or not choice["delta"], "the reason to end stands alone"
            self._begun.add(choice["index"])

    def take_done(self) -> None:
        """Raise if `[DONE]` must not come now."""
        assert not self._may_end, "nothing follows [DONE] or an error"
        self._order.end()
        self._may_end = True

    def end(self) -> None:
        """Raise if the stream must not end now."""
        assert self._may_end, "the last event is [DONE] or an error"


def order_of(path: str) -> OurOrder:
    """Return what the events of a path's streams have to keep to."""
    if path == "/v1/messages":
        return OurOrder(MessageOrder())
    if path.startswith("/v1/responses"):
        return OurOrder(ResponseOrder())
    return OurChunkOrder(is_chat=path == "/v1/chat/completions")
