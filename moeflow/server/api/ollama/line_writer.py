"""Writes answers as Ollama does: one object, or a line of JSON for each pass and a last one with counts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from moeflow.server.api.conversation.call_arguments import arguments_of
from moeflow.server.api.conversation.conversation import AnswerEvents, AnswerForm
from moeflow.server.api.logprobs import listed_logprobs
from moeflow.server.api.ollama.heads import Shape, head, nanoseconds
from moeflow.server.errors import ApiError
from moeflow.server.generation import Generation
from moeflow.server.sse import line
from moeflow.text.output_text import TextDelta
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Event, Reasoning


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request came and when its model was loaded, on the clock of time.monotonic."""

    begun_s: float
    loaded_s: float


@dataclass(slots=True)
class _LinePart:
    """What the model wrote, all or since the last line."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.logprobs)


class LineWriter:
    """Writes one answer. A call is written when it is complete, as its arguments are an object."""

    def __init__(
        self,
        model: str,
        generation: Generation,
        form: AnswerForm,
        shape: Shape,
        clock: RequestTimes,
        *,
        with_context: bool = False,
    ) -> None:
        """`with_context`: the end has the token ids of prompt and answer."""
        self._model = model
        self._generation = generation
        self._form = form
        self._shape = shape
        self._clock = clock
        self._answer = AnswerEvents(form)
        self._context = list(generation.prompts[0]) if with_context else None
        self._call: tuple[str, list[str]] | None = None  # name and arguments of the open one
        self._num_calls = 0
        self._part = _LinePart()
        self._done_reason: str | None = None

    def begin(self) -> bytes:
        """Return nothing: streams begin with what the model writes."""
        return b""

    def write(self, choice: int, delta: TextDelta) -> bytes:
        """Return the line for a delta."""
        self.add(choice, delta)
        if not self._part:
            return b""
        written = line({**self._head(), **self._fields(), "done": False})
        self._part = _LinePart()
        return written

    def end(self) -> bytes:
        """Return the last line."""
        return line(self.body())

    def fail(self, error: ApiError) -> bytes:
        """Return the reason, in the place of the last line."""
        return line(error.ollama_body)

    def add(self, choice: int, delta: TextDelta) -> None:
        """Add what a delta brought."""
        for event in self._answer.read(delta):
            self._take(event)
        self._part.logprobs += listed_logprobs(delta.logprobs or ())
        if self._context is not None:
            self._context += delta.token_ids
        if delta.finish_reason is not None:
            self._close_call()
            self._done_reason = str(delta.finish_reason)

    def body(self) -> dict[str, Any]:
        """Return the whole answer, or the rest of it for the last line."""
        context = {} if self._context is None else {"context": self._context}
        end = {"done": True, "done_reason": self._done_reason}
        return self._head() | self._fields() | end | context | self._counts()

    def _take(self, event: Event) -> None:
        match event:
            case Content():
                self._part.content += event.text
            case Reasoning():
                self._part.thinking += event.text
            case CallBegun():
                self._close_call()
                self._call = (event.name, [])
            case Arguments():
                assert self._call is not None, "arguments follow the name"
                self._call[1].append(event.text)

    def _close_call(self) -> None:
        if self._call is None:
            return
        name, pieces = self._call
        function = {"index": self._num_calls, "name": name, "arguments": arguments_of("".join(pieces))}
        self._part.calls.append({"id": self._form.make_id(), "function": function})
        self._call = None
        self._num_calls += 1

    def _head(self) -> dict[str, Any]:
        return head(self._model)

    def _fields(self) -> dict[str, Any]:
        part = self._part
        fields = self._shape(part.content, part.thinking, part.calls)
        return fields | ({"logprobs": part.logprobs} if part.logprobs else {})

    def _counts(self) -> dict[str, int]:
        generation, clock, now_s = self._generation, self._clock, time.monotonic()
        begun_s = generation.begun_at_s or now_s
        first_s, last_s = generation.first_token_at_s or now_s, generation.last_token_at_s or now_s
        return {
            "total_duration": nanoseconds(now_s - clock.begun_s),
            "load_duration": nanoseconds(clock.loaded_s - clock.begun_s),
            "prompt_eval_count": generation.num_prompt_tokens,
            "prompt_eval_duration": nanoseconds(first_s - begun_s),
            "eval_count": generation.num_completion_tokens,
            "eval_duration": nanoseconds(last_s - first_s),
        }
