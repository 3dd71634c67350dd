"""The output of a response: items that grow as the model writes, and the events of each step."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from moeflow.server.api.answer import Emit
from moeflow.server.api.responses.offered_tools import Called
from moeflow.server.api.responses.sealed import sealed
from moeflow.server.api.responses.written_calls import StreamedCall, written_call
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Event, Reasoning

_PARTS: Final[
    dict[str, tuple[dict[str, Any], str]]
] = {  # of items that have text: the part that it is in, and how its events are called
    "message": ({"type": "output_text", "text": "", "annotations": [], "logprobs": []}, "response.output_text"),
    "reasoning": ({"type": "reasoning_text", "text": ""}, "response.reasoning_text"),
}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseOutput:
    """The items so far. The last one is open until another begins, or the output is closed."""

    def __init__(
        self,
        make_call_id: Callable[[], str],
        emit: Emit,
        make_item_id: Callable[[str], str] = _new_id,
        *,
        called: Callable[[str], Called],
        seals_reasoning: bool = False,
    ) -> None:
        """`make_item_id` gets a prefix for the kind of item, `called` the name of a tool that the model calls.

        `seals_reasoning`: reasoning is in `encrypted_content`, too, for clients that send only this back.
        """
        self.items: list[dict[str, Any]] = []
        self._make_call_id, self._make_item_id = make_call_id, make_item_id
        self._emit = emit
        self._called, self._seals_reasoning = called, seals_reasoning
        self._call: StreamedCall | None = None  # that is open
        self._kind: str | None = None  # of the open item
        self._text: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []  # of the open message

    def take(self, event: Event, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        """Add text of the model; for a message also its tokens, if requested."""
        match event:
            case Content():
                self._write("message", event.text, logprobs)
            case Reasoning():
                self._write("reasoning", event.text)
            case CallBegun():
                self._begin_call(self._called(event.name))
            case Arguments() if self._call is not None:
                self._emit_input(self._call, self._call.push(event.text))

    def close(self, status: str) -> None:
        """End the open item with a status, if there is one."""
        if self._kind is None:
            return
        item, text = self.items[-1], "".join(self._text)
        item["status"] = status
        if self._call is not None:
            self._end_call(self._call, item)
        else:
            part, name = _PARTS[self._kind]
            whole = {"text": text, "logprobs": self._logprobs} if self._kind == "message" else {"text": text}
            item["content"] = [{**part, **whole}]
            if self._kind == "reasoning" and self._seals_reasoning:
                item["encrypted_content"] = sealed(text)
            extras = _extras(self._kind, self._logprobs)
            self._emit(f"{name}.done", **self._place, content_index=0, text=text, **extras)
            self._emit("response.content_part.done", **self._place, content_index=0, part=item["content"][0])
        self._emit("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self._kind = self._call = None

    def write_nothing(self) -> None:
        """Add an empty message, where the model said nothing at all."""
        if not self.items:
            self._write("message", "")

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}

    def _begin_call(self, called: Called) -> None:
        self.close("completed")
        call = written_call(called)
        _, empty = call.finish()
        fields = {"call_id": self._make_call_id(), **call.fields(), call.field: empty}
        self._open(called.kind, call.prefix, fields)
        self._call = call

    def _end_call(self, call: StreamedCall, item: dict[str, Any]) -> None:
        rest, whole = call.finish()
        self._emit_input(call, rest)
        item[call.field] = whole
        if call.event is not None:
            self._emit(f"{call.event}.done", **self._place, **{call.field: whole})

    def _emit_input(self, call: StreamedCall, delta: str) -> None:
        if delta and call.event is not None:
            self._emit(f"{call.event}.delta", **self._place, delta=delta)

    def _write(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        part, name = _PARTS[kind]
        if self._kind != kind:
            self.close("completed")
            is_message = kind == "message"
            self._open(kind, "msg" if is_message else "rs", {"role": "assistant"} if is_message else {"summary": []})
            self._emit("response.content_part.added", **self._place, content_index=0, part=part)
        if text:
            self._text.append(text)
            self._logprobs += logprobs
            self._emit(f"{name}.delta", **self._place, content_index=0, delta=text, **_extras(kind, logprobs))

    def _open(self, kind: str, prefix: str, fields: dict[str, Any]) -> None:
        item = {"id": self._make_item_id(prefix), "type": kind, "status": "in_progress", **fields}
        if kind in _PARTS:
            item["content"] = []
        self.items.append(item)
        self._kind = kind
        self._text, self._logprobs = [], []
        self._emit("response.output_item.added", output_index=len(self.items) - 1, item=item)


def _extras(kind: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the other fields of text events. As in OpenAI's API, they contain no bytes."""
    if kind != "message":
        return {}
    return {
        "logprobs": [
            {**_without_bytes(token), "top_logprobs": [_without_bytes(top) for top in token["top_logprobs"]]}
            for token in logprobs
        ]
    }


def _without_bytes(token: dict[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"]}
