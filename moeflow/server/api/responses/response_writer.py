"""Writes responses as OpenAI does: an object with a list of items, or typed events that build it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from moeflow.core.request import FinishReason
from moeflow.server.api.conversation.conversation import AnswerEvents, AnswerForm
from moeflow.server.api.conversation.text_tokens import TextTokens
from moeflow.server.api.logprobs import listed_logprobs
from moeflow.server.api.responses.offered_tools import Called
from moeflow.server.api.responses.response_output import ResponseOutput
from moeflow.server.errors import ApiError, PromptTooLongError
from moeflow.server.generation import Generation
from moeflow.server.sse import named_event
from moeflow.text.output_text import TextDelta


def _begun(head: dict[str, Any]) -> dict[str, Any]:
    """Return a response that has no output yet."""
    return {
        **head,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


def too_long_events(head: dict[str, Any], error: PromptTooLongError) -> bytes:
    """Return the events of a response that fails before it begins. Codex shortens the conversation by this code."""
    begun = _begun(head)
    failed = {**begun, "status": "failed", "error": {"code": error.code, "message": error.detail}}
    responses = {"response.created": begun, "response.in_progress": begun, "response.failed": failed}
    return b"".join(
        named_event({"type": kind, "sequence_number": number, "response": response})
        for number, (kind, response) in enumerate(responses.items())
    )


class ResponseWriter:
    """Writes one response."""

    def __init__(
        self,
        generation: Generation,
        form: AnswerForm,
        head: dict[str, Any],
        on_end: Callable[[dict[str, Any]], None],
        *,
        called: Callable[[str], Called],
        seals_reasoning: bool,
    ) -> None:
        """`head` has the fields that are known from the beginning; `on_end` gets the response at its end.

        The last two as for `ResponseOutput`.
        """
        self._on_end = on_end
        self._generation = generation
        self._answer = AnswerEvents(form)
        self._tokens = TextTokens()
        self._output = ResponseOutput(form.make_id, self._emit, called=called, seals_reasoning=seals_reasoning)
        self._response = _begun(head)
        self._finish_reason: FinishReason | None = None
        self._is_streamed = False
        self._num_events = 0
        self._events = bytearray()

    def begin(self) -> bytes:
        """Return the events of a response that has no output yet."""
        self._is_streamed = True
        self._emit("response.created", response=self._response)
        self._emit("response.in_progress", response=self._response)
        return self._take()

    def write(self, choice: int, delta: TextDelta) -> bytes:
        """Return the events for a delta."""
        self.add(choice, delta)
        return self._take()

    def end(self) -> bytes:
        """Return the events of the end; the last one has the whole response."""
        self._finish()
        self._emit(f"response.{self._response['status']}", response=self._response)
        return self._take()

    def fail(self, error: ApiError) -> bytes:
        """Return the event of a response that failed; it has the items that were complete."""
        code = "rate_limit_exceeded" if error.status_code == 429 else "server_error"
        output = [item for item in self._output.items if item["status"] != "in_progress"]
        failed = {"status": "failed", "error": {"code": code, "message": error.detail}, "output": output}
        self._response = {**self._response, **failed, "completed_at": None, "usage": self._usage()}
        self._emit("response.failed", response=self._response)
        return self._take()

    def add(self, choice: int, delta: TextDelta) -> None:
        """Add what a delta brought."""
        events = self._answer.read(delta)
        for event, tokens in self._tokens.split(delta.logprobs or (), events, self._answer.text_behind):
            self._output.take(event, listed_logprobs(tokens))
        self._finish_reason = delta.finish_reason or self._finish_reason

    def body(self) -> dict[str, Any]:
        """Return the whole response."""
        self._finish()
        return self._response

    def _finish(self) -> None:
        is_cut = self._finish_reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        self._output.write_nothing()
        self._output.close(status)
        self._response = {
            **self._response,
            "completed_at": None if is_cut else int(time.time()),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output.items,
            "usage": self._usage(),
        }
        self._on_end(self._response)

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self._generation.num_prompt_tokens, self._generation.num_completion_tokens
        return {
            "input_tokens": prompt,
            # Prompts are cached while memory suffices, not on a client's request.
            "input_tokens_details": {"cached_tokens": self._generation.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._answer.num_reasoning_tokens},
            "total_tokens": prompt + completion,
        }

    def _emit(self, kind: str, /, **fields: Any) -> None:
        if self._is_streamed:
            self._events += named_event({"type": kind, "sequence_number": self._num_events, **fields})
            self._num_events += 1

    def _take(self) -> bytes:
        events = bytes(self._events)
        self._events.clear()
        return events
