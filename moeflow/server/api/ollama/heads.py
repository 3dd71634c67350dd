"""What answers of Ollama's API begin with, and what those have that generate nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Protocol

from moeflow.server.api.ollama.answer_objects import DoneReason
from moeflow.server.api.stream_dialect import StreamDialect
from moeflow.server.sse import NDJSON, line


class Shape(Protocol):
    """How an endpoint writes a part of the model's message."""

    def __call__(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of an answer."""


def chat_shape(content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a part of a message as `/api/chat` has it."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"thinking": thinking} if thinking else {}
    return {"message": message | ({"tool_calls": calls} if calls else {})}


def generate_shape(content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a part of a message as `/api/generate` has it: it offers no tools, so there are no calls."""
    return {"response": content} | ({"thinking": thinking} if thinking else {})


def head(model: str) -> dict[str, Any]:
    """Return the fields that each answer begins with."""
    return {"model": model, "created_at": rfc3339(datetime.now(UTC))}


def rfc3339(time: datetime) -> str:
    """Return a time of UTC as text."""
    return f"{time.replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def nanoseconds(duration_s: float) -> int:
    """Return a duration, at least one nanosecond: clients divide by it."""
    return max(round(duration_s * 1e9), 1)


def dialect(model: str | None, shape: Shape) -> StreamDialect:
    """Return the lines outside of an answer. In pauses they have no text: clients of Ollama skip no line."""
    ping = line({**head(model or ""), **shape("", "", []), "done": False})
    return StreamDialect(ping, lambda error: line(error.ollama_body), NDJSON)


def empty_answer(model: str, shape: Shape, reason: DoneReason) -> dict[str, Any]:
    """Return the answer to a request that generates nothing."""
    return {**head(model), **shape("", "", []), "done": True, "done_reason": reason}
