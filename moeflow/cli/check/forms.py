"""Completions and chat alike: how each asks for text, and where its answers have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from moeflow.cli.check.openai_shapes import ChatChunk, ChatCompletion, Completion, CompletionChunk, FinishReason
from moeflow.cli.check.outcome import Failed
from moeflow.cli.check.sse import DONE, Event
from moeflow.cli.check.stream_order import ChunkOrder
from moeflow.cli.check.target import Body, Target

Shape = TypeVar("Shape")
NUM_TOKENS = 12
ASK = "Count from one to ten in words."


class Part(msgspec.Struct):
    """Text of one choice, whole or in part."""

    index: int
    text: str
    finish_reason: FinishReason | None


class Form(Protocol):
    """One of the two endpoints."""

    path: str
    whole: type[Completion | ChatCompletion]

    def body(self, target: Target, **changes: Any) -> Body:
        """Return a request for a short answer without randomness."""

    def ask(self, target: Target, *, again: bool = False, **changes: Any) -> Completion | ChatCompletion:
        """Return a successful answer."""

    def parts(self, answer: Completion | ChatCompletion) -> list[Part]:
        """Return all choices."""

    def chunks(self, target: Target, **changes: Any) -> Sequence[CompletionChunk | ChatChunk]:
        """Return the events of a stream in the right order."""

    def streamed(self, chunks: Sequence[CompletionChunk | ChatChunk]) -> list[Part]:
        """Return all choices of a stream with their joined parts."""


class CompletionForm:
    """`/v1/completions`."""

    path = "/v1/completions"
    whole: type[Completion | ChatCompletion] = Completion

    def body(self, target: Target, **changes: Any) -> Body:
        """See `Form`."""
        return {"model": target.model, "prompt": ASK, "max_tokens": NUM_TOKENS, "temperature": 0, **changes}

    def ask(self, target: Target, *, again: bool = False, **changes: Any) -> Completion:
        """See `Form`."""
        return target.ask(self.path, self.body(target, **changes), Completion, again=again)

    def parts(self, answer: Completion | ChatCompletion) -> list[Part]:
        """See `Form`."""
        assert isinstance(answer, Completion)
        return [Part(choice.index, choice.text, choice.finish_reason) for choice in answer.choices]

    def chunks(self, target: Target, **changes: Any) -> Sequence[CompletionChunk]:
        """See `Form`."""
        events = target.stream(self.path, self.body(target, **changes))
        return _read_chunks(events, CompletionChunk, is_chat=False, with_usage="stream_options" in changes)

    def streamed(self, chunks: Sequence[CompletionChunk | ChatChunk]) -> list[Part]:
        """See `Form`."""
        return _join(
            Part(choice.index, choice.text, choice.finish_reason)
            for chunk in chunks
            if isinstance(chunk, CompletionChunk)
            for choice in chunk.choices
        )


class ChatForm:
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"
    whole: type[Completion | ChatCompletion] = ChatCompletion

    def body(self, target: Target, **changes: Any) -> Body:
        """See `Form`."""
        messages = [{"role": "user", "content": ASK}]
        return {"model": target.model, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, **changes}

    def ask(self, target: Target, *, again: bool = False, **changes: Any) -> ChatCompletion:
        """See `Form`."""
        return target.ask(self.path, self.body(target, **changes), ChatCompletion, again=again)

    def parts(self, answer: Completion | ChatCompletion) -> list[Part]:
        """See `Form`."""
        assert isinstance(answer, ChatCompletion)
        return [Part(it.index, it.message.content or "", it.finish_reason) for it in answer.choices]

    def chunks(self, target: Target, **changes: Any) -> Sequence[ChatChunk]:
        """See `Form`."""
        events = target.stream(self.path, self.body(target, **changes))
        return _read_chunks(events, ChatChunk, is_chat=True, with_usage="stream_options" in changes)

    def streamed(self, chunks: Sequence[CompletionChunk | ChatChunk]) -> list[Part]:
        """See `Form`."""
        return _join(
            Part(choice.index, choice.delta.content or "", choice.finish_reason)
            for chunk in chunks
            if isinstance(chunk, ChatChunk)
            for choice in chunk.choices
        )


def _read_chunks(events: list[Event], kind: type[Shape], *, is_chat: bool, with_usage: bool) -> list[Shape]:
    """Return the chunks of a stream. Raises: Failed if one has another shape, or comes at the wrong time."""
    order = ChunkOrder(is_chat=is_chat, with_usage=with_usage)
    chunks = []
    for event in events:
        if event.data == DONE:
            continue
        value = event.value()
        chunks.append(convert(value, kind))
        order.take(value)
    order.end()
    return chunks


def convert(value: object, kind: type[Shape]) -> Shape:
    """Return decoded JSON as a shape. Raises: Failed if it has another one."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Failed(f"{error}: {str(value)[:200]}") from None


def _join(parts: Any) -> list[Part]:
    joined: dict[int, Part] = {}
    for part in parts:
        whole = joined.setdefault(part.index, Part(part.index, "", None))
        whole.text += part.text
        whole.finish_reason = whole.finish_reason or part.finish_reason
    return [joined[index] for index in sorted(joined)]
