"""Writes messages as Anthropic does: an object with a list of blocks, or events that build it."""

from __future__ import annotations

from typing import Any

from moeflow.core.request import FinishReason
from moeflow.server.api.conversation.conversation import AnswerEvents, AnswerForm
from moeflow.server.api.messages.message_blocks import MessageBlocks
from moeflow.server.errors import ApiError
from moeflow.server.generation import Generation
from moeflow.server.sse import named_event
from moeflow.text.output_text import TextDelta


class MessageWriter:
    """Writes one message."""

    def __init__(self, generation: Generation, form: AnswerForm, head: dict[str, Any], *, max_tokens: int) -> None:
        """`head` has the fields that are known from the beginning, `max_tokens` is what the request allows."""
        self._generation = generation
        self._answer = AnswerEvents(form)
        self._blocks = MessageBlocks(form.make_id, self._emit)
        self._head = head
        self._max_tokens = max_tokens
        self._end: TextDelta | None = None
        self._is_streamed = False
        self._events = bytearray()

    def begin(self) -> bytes:
        """Return the events of a message that has no content yet."""
        self._is_streamed = True
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        self._emit("message_start", message=message)
        self._emit("ping")
        return self._take()

    def write(self, choice: int, delta: TextDelta) -> bytes:
        """Return the events for a delta."""
        self.add(choice, delta)
        return self._take()

    def end(self) -> bytes:
        """Return the events of the end."""
        self._blocks.close()
        self._emit("message_delta", delta=self._reason(), usage=self._usage())
        self._emit("message_stop")
        return self._take()

    def fail(self, error: ApiError) -> bytes:
        """Return the error's event."""
        return self._take() + named_event(error.anthropic_body)

    def add(self, choice: int, delta: TextDelta) -> None:
        """Add what a delta brought."""
        for event in self._answer.read(delta):
            self._blocks.take(event)
        if delta.finish_reason is not None:
            self._end = delta

    def body(self) -> dict[str, Any]:
        """Return the whole message."""
        self._blocks.close()
        return {**self._head, "content": self._blocks.blocks, **self._reason(), "usage": self._usage()}

    def _reason(self) -> dict[str, Any]:
        assert self._end is not None, "called at the end"
        stop = self._end.stop_reason if isinstance(self._end.stop_reason, str) else None
        if self._end.finish_reason is FinishReason.LENGTH:
            is_full = self._generation.num_completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif self._answer.num_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        cached = self._generation.num_cached_tokens
        return {
            "input_tokens": self._generation.num_prompt_tokens - cached,
            "output_tokens": self._generation.num_completion_tokens,
            # Prompts are cached while memory suffices, not on a client's request.
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens_details": {"thinking_tokens": self._answer.num_reasoning_tokens},
        }

    def _emit(self, kind: str, /, **fields: Any) -> None:
        if self._is_streamed:
            self._events += named_event({"type": kind, **fields})

    def _take(self) -> bytes:
        events = bytes(self._events)
        self._events.clear()
        return events
