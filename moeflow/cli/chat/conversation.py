"""The state of a chat: its messages, and how answers are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from moeflow.cli.chat.chat_backend import Messages
from moeflow.core.sampling_params import SamplingParams


@dataclass
class ChatHistory:
    """One conversation. The turns alternate user, assistant."""

    sampling: SamplingParams
    system: str | None = None
    turns: Messages = field(default_factory=list)

    def messages(self, question: str, *, again: bool = False) -> Messages:
        """Return what the model is asked when the user says `question` next, or `again` in the place of the last."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self._before(again), {"role": "user", "content": question}]

    def add(self, question: str, answer: str, *, again: bool = False) -> None:
        """Append a question and its answer, even if the answer was stopped."""
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        self.turns = [*self._before(again), *said]

    def _before(self, again: bool) -> Messages:
        return self.turns[:-2] if again else self.turns
