"""Writes choice objects of chat as OpenAI does: a stream names the role first and the reason to end alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moeflow.core.request import FinishReason
from moeflow.server.api.choices import Choice, token_trees
from moeflow.server.api.conversation.conversation import AnswerEvents, AnswerForm
from moeflow.server.api.logprobs import chat_logprobs
from moeflow.text.output_text import TextDelta
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Reasoning


@dataclass(slots=True)
class _WholeAnswer:
    """What a whole answer has come to so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class ChatWriter:
    """Writes the choices of one answer."""

    def __init__(self, form: AnswerForm, *, with_logprobs: bool) -> None:
        self._form = form
        self._with_logprobs = with_logprobs
        self._answers: dict[int, AnswerEvents] = {}

    def chunk_choices(self, choice: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return choice objects: role, then what the delta brought, then the end. Progress of a prompt has one."""
        chunks = []
        if choice not in self._answers:
            self._answers[choice] = AnswerEvents(self._form)
            chunks.append(_chunk(choice, {"role": "assistant", "content": "", "refusal": None}))
        elif delta.prompt_progress is not None:
            chunks.append(_chunk(choice, {}))
        answer = self._answers[choice]
        deltas = self._deltas(answer, delta)
        logprobs = chat_logprobs(delta.logprobs or ()) if self._with_logprobs and delta.logprobs else None
        if (logprobs or delta.drafted_pass) and not deltas:
            deltas = [{"content": ""}]
        for number, new in enumerate(deltas):
            trees = () if number or delta.drafted_pass is None else (delta.drafted_pass,)
            chunks.append(_chunk(choice, new, None if number else logprobs) | token_trees(trees))
        if delta.finish_reason is not None:
            chunks.append(_chunk(choice, {}, finish_reason=_reason(delta.finish_reason, answer.num_calls)))
        return chunks

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return the whole answer."""
        answer, said = AnswerEvents(self._form), _WholeAnswer()
        whole = TextDelta(index=0, text=choice.text, finish_reason=choice.finish_reason)
        for delta in self._deltas(answer, whole):
            _add(said, delta)
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.calls:
            message |= {"content": said.content or None, "tool_calls": said.calls}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.tokens) if self._with_logprobs else None,
            "finish_reason": _reason(choice.finish_reason, answer.num_calls),
            **token_trees(choice.drafted_passes),
        }

    def _deltas(self, answer: AnswerEvents, delta: TextDelta) -> list[dict[str, Any]]:
        """Return what a delta brought as parts of a message."""
        num_calls = answer.num_calls
        parts: list[dict[str, Any]] = []
        for event in answer.read(delta):
            match event:
                case Content():
                    parts.append({"content": event.text})
                case Reasoning():
                    parts.append({"reasoning_content": event.text})
                case CallBegun():
                    num_calls += 1
                    new = {"id": self._form.make_id(), "type": "function"}
                    parts.append(_call(num_calls, {"name": event.name, "arguments": ""}, new))
                case Arguments():
                    parts.append(_call(num_calls, {"arguments": event.text}, {}))
        return parts


def _call(number: int, function: dict[str, str], new: dict[str, str]) -> dict[str, Any]:
    return {"tool_calls": [{"index": number - 1, **new, "function": function}]}


def _add(said: _WholeAnswer, delta: dict[str, Any]) -> None:
    said.content += delta.get("content", "")
    said.reasoning += delta.get("reasoning_content", "")
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            said.calls.append({key: value for key, value in call.items() if key != "index"})
        else:
            said.calls[-1]["function"]["arguments"] += call["function"]["arguments"]


def _reason(reason: FinishReason | None, num_calls: int) -> str | None:
    return "tool_calls" if reason is FinishReason.STOP and num_calls else reason


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
