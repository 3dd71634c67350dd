"""Writes choice objects of chat as OpenAI does: a stream names the role first and the reason to end alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moeflow.core.request import FinishReason
from moeflow.engine.text.answer_reader import AnswerReader
from moeflow.engine.text.output_text import TextDelta
from moeflow.engine.text.tool_syntax.events import Arguments, CallBegun, Content, Event, Reasoning
from moeflow.server.api.answer import Choice, token_trees
from moeflow.server.api.logprobs import chat_logprobs


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How answers to one request are read and written."""

    make_reader: Callable[[], AnswerReader | None]  # for each choice; None: text for the user, as it stands
    make_id: Callable[[], str]  # of calls
    is_parallel: bool = True  # whether more than the first call counts
    with_logprobs: bool = False


@dataclass(slots=True)
class _Said:
    """What one choice has come to so far."""

    reader: AnswerReader | None
    num_calls: int = 0
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class ChatWriter:
    """Writes the choices of one answer."""

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._said: dict[int, _Said] = {}

    def chunk_choices(self, choice: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return choice objects: role, then what the delta brought, then the end."""
        chunks = []
        if choice not in self._said:
            self._said[choice] = _Said(self._form.make_reader())
            chunks.append(_chunk(choice, {"role": "assistant", "content": "", "refusal": None}))
        said = self._said[choice]
        deltas = [new for event in _events(said.reader, delta) if (new := self._delta(said, event)) is not None]
        logprobs = chat_logprobs(delta.logprobs or ()) if self._form.with_logprobs and delta.logprobs else None
        if (logprobs or delta.guessed_pass) and not deltas:
            deltas = [{"content": ""}]
        for number, new in enumerate(deltas):
            trees = () if number or delta.guessed_pass is None else (delta.guessed_pass,)
            chunks.append(_chunk(choice, new, None if number else logprobs) | token_trees(trees))
        if delta.finish_reason is not None:
            chunks.append(_chunk(choice, {}, finish_reason=_reason(delta.finish_reason, said.num_calls)))
        return chunks

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return the whole answer."""
        said = _Said(self._form.make_reader())
        for event in _events(said.reader, TextDelta(index=0, text=choice.text, finish_reason=choice.finish_reason)):
            self._add(said, event)
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.calls:
            message |= {"content": said.content or None, "tool_calls": said.calls}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.tokens) if self._form.with_logprobs else None,
            "finish_reason": _reason(choice.finish_reason, said.num_calls),
            **token_trees(choice.guessed_passes),
        }

    def _add(self, said: _Said, event: Event) -> None:
        """Add an event to a whole message."""
        delta = self._delta(said, event)
        if delta is None:
            return
        said.content += delta.get("content", "")
        said.reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                said.calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                said.calls[-1]["function"]["arguments"] += call["function"]["arguments"]

    def _delta(self, said: _Said, event: Event) -> dict[str, Any] | None:
        """Return an event as part of a message; None: it is of a call too many."""
        match event:
            case Content():
                return {"content": event.text}
            case Reasoning():
                return {"reasoning_content": event.text}
            case CallBegun():
                said.num_calls += 1
                new = {"id": self._form.make_id(), "type": "function"}
                function = {"name": event.name, "arguments": ""}
            case Arguments():
                new, function = {}, {"arguments": event.text}
        if said.num_calls > 1 and not self._form.is_parallel:
            return None
        return {"tool_calls": [{"index": said.num_calls - 1, **new, "function": function}]}


def _events(reader: AnswerReader | None, delta: TextDelta) -> list[Event]:
    if reader is None:
        return [Content(delta.text)] if delta.text else []
    events = reader.push(delta.text)
    return events + reader.finish() if delta.finish_reason is not None else events


def _reason(reason: FinishReason | None, num_calls: int) -> str | None:
    return "tool_calls" if reason is FinishReason.STOP and num_calls else reason


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
