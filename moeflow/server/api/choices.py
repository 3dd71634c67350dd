"""The form that completions and chat share: an object with a list of choices, and a stream of such objects that ends
with `[DONE]`. Knows no field of a choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from moeflow.core.request import FinishReason
from moeflow.server.api.prompt_progress import progress_object
from moeflow.server.api.timings import timings
from moeflow.server.api.usage import usage
from moeflow.server.errors import ApiError
from moeflow.server.generation import Generation
from moeflow.server.sse import DONE, event
from moeflow.text.drafted_passes import DraftedPass
from moeflow.text.output_text import TextDelta, TokenText


@dataclass(slots=True)
class Choice:
    """One completion, gathered from its deltas."""

    index: int
    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)  # empty unless log-probabilities were asked for
    prompt_tokens: tuple[TokenText | None, ...] = ()  # likewise; on a prompt's first completion only
    drafted_passes: list[DraftedPass] = field(default_factory=list)  # empty unless token trees were asked for
    finish_reason: FinishReason | None = None

    def add(self, delta: TextDelta) -> None:
        """Append what one pass brought."""
        self.text += delta.text
        self.tokens += delta.logprobs or ()
        self.prompt_tokens = self.prompt_tokens or delta.prompt_logprobs or ()
        self.drafted_passes += [] if delta.drafted_pass is None else [delta.drafted_pass]
        self.finish_reason = delta.finish_reason or self.finish_reason


class ChoiceWriter(Protocol):
    """How one endpoint writes its choices."""

    def chunk_choices(self, choice: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the choice objects to stream for a delta, each an event of its own; none if it shows nothing."""

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return the choice object of an unstreamed answer."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one answer has in common."""

    id: str
    created: int
    model: str
    kind: str  # the `object` field of a whole answer
    chunk_kind: str  # the same of a chunk

    def head(self, kind: str) -> dict[str, Any]:
        """Return the common fields."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def token_trees(passes: Sequence[DraftedPass]) -> dict[str, Any]:
    """Return the drafts as a field of a choice; no field if not requested, or if there are none yet."""
    return {"token_trees": msgspec.to_builtins(passes)} if passes else {}


class ListWriter:
    """Writes lists of choices."""

    def __init__(
        self,
        generation: Generation,
        choices: ChoiceWriter,
        envelope: Envelope,
        *,
        with_usage: bool,
        with_timings: bool,
    ) -> None:
        """`with_usage`: a stream ends with the token counts. `with_timings`: every object has the times so far."""
        self._generation = generation
        self._writer = choices
        self._envelope = envelope
        self._head = envelope.head(envelope.chunk_kind)
        self._tail: dict[str, Any] = {"usage": None} if with_usage else {}
        self._with_timings = with_timings
        self._choices = [Choice(index) for index in range(len(generation.prompts) * generation.n)]

    def begin(self) -> bytes:
        """Return nothing: streams begin with a choice."""
        return b""

    def write(self, choice: int, delta: TextDelta) -> bytes:
        """Return a chunk for each choice object."""
        written = self._writer.chunk_choices(choice, delta)
        tail = self._tail | self._timings() if self._with_timings else self._tail
        if delta.prompt_progress is not None:
            tail = tail | {"prompt_progress": progress_object(delta.prompt_progress)}
        return b"".join([event({**self._head, "choices": [one], **tail}) for one in written])

    def end(self) -> bytes:
        """Return the token counts, if they are asked for, and the end."""
        if not self._tail:
            return DONE
        counts = {"usage": usage(self._generation), **self._timings()}
        return event({**self._head, "choices": [], **counts}) + DONE

    def fail(self, error: ApiError) -> bytes:
        """Return the reason, in the place of the end."""
        return event(error.body)

    def add(self, choice: int, delta: TextDelta) -> None:
        """Append a delta to its choice."""
        self._choices[choice].add(delta)

    def body(self) -> dict[str, Any]:
        """Return all choices and the token counts."""
        for choice in self._choices:  # the engine reports a prompt's log-probabilities once
            choice.prompt_tokens = self._choices[choice.index - choice.index % self._generation.n].prompt_tokens
        written = [self._writer.choice(choice) for choice in self._choices]
        counts = {"usage": usage(self._generation), **self._timings()}
        return {**self._envelope.head(self._envelope.kind), "choices": written, **counts}

    def _timings(self) -> dict[str, Any]:
        return {"timings": timings(self._generation)} if self._with_timings else {}
