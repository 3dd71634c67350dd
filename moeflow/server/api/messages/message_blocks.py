"""The content of a message: blocks that grow as the model writes, and the events of each step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from moeflow.server.api.answer import Emit
from moeflow.server.api.conversation.call_arguments import parsed_object, read_object
from moeflow.text.answer_reader import AnswerReader
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Event, Reasoning


class MessageBlocks:
    """The blocks so far. The last one is open until another begins, or the content is closed."""

    def __init__(self, make_call_id: Callable[[], str], emit: Emit) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._make_call_id = make_call_id
        self._emit = emit
        self._kind: str | None = None  # of the open block
        self._text: list[str] = []  # of the open block: its text, or JSON of a call's input
        self._input = AnswerReader(read_object)  # of the open call

    def take(self, event: Event) -> None:
        """Add what the model wrote."""
        match event:
            case Content():
                self._open_unless_open("text", {"text": ""})
                self._add("text_delta", "text", event.text)
            case Reasoning():
                self._open_unless_open("thinking", {"thinking": "", "signature": ""})
                self._add("thinking_delta", "thinking", event.text)
            case CallBegun():
                self.close()
                self._open("tool_use", {"id": self._make_call_id(), "name": event.name, "input": {}})
                self._input = AnswerReader(read_object)
            case Arguments():
                for piece in self._input.push(event.text):
                    if isinstance(piece, Arguments):
                        self._add("input_json_delta", "partial_json", piece.text)

    def close(self) -> None:
        """End the open block, if there is one."""
        if self._kind is None:
            return
        block, text = self.blocks[-1], "".join(self._text)
        if self._kind == "tool_use":
            # Clients parse a stream by the same rules: an incomplete value yields its certain part.
            block["input"] = parsed_object(text)
        else:
            block[self._kind] = text
        if self._kind == "thinking":
            block["signature"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            self._delta("signature_delta", "signature", block["signature"])
        self._emit("content_block_stop", index=len(self.blocks) - 1)
        self._kind = None

    def _open_unless_open(self, kind: str, fields: dict[str, Any]) -> None:
        if self._kind != kind:
            self.close()
            self._open(kind, fields)

    def _open(self, kind: str, fields: dict[str, Any]) -> None:
        self._kind = kind
        self._text = []
        self.blocks.append({"type": kind, **fields})
        self._emit("content_block_start", index=len(self.blocks) - 1, content_block=self.blocks[-1])

    def _add(self, kind: str, field: str, text: str) -> None:
        self._text.append(text)
        self._delta(kind, field, text)

    def _delta(self, kind: str, field: str, text: str) -> None:
        self._emit("content_block_delta", index=len(self.blocks) - 1, delta={"type": kind, field: text})
