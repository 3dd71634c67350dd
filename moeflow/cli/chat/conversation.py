"""A chat's state and the commands that change it: what has been said, and how answers are sampled.

Knows nothing of terminals or models: a command takes its text and returns what to show.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moeflow.cli.chat.chat_backend import Messages
from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import SamplingParams

SETTABLE = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")

HELP = f"""\
/reset             forget what was said
/system [TEXT]     tell the model who it is (and forget what was said); without TEXT: nobody
/set [NAME VALUE]  change how answers are chosen: {", ".join(SETTABLE)}; alone: show
/exit              leave; so do Ctrl-C and Ctrl-D at the prompt
Ctrl-C while an answer comes stops it."""


class Leave(Exception):
    """The user wants to go."""


@dataclass
class Conversation:
    """One conversation. The turns alternate user, assistant."""

    sampling: SamplingParams
    system: str | None = None
    turns: Messages = field(default_factory=list)

    def messages(self, question: str) -> Messages:
        """Return what the model is asked when the user says `question` next."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Remember a question and what was answered, even if the answer was stopped."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str:
        """Carry out a line that begins with a slash and return what to show.

        Raises: Leave.
        """
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "help": lambda _: HELP,
            "reset": self._reset,
            "system": self._system,
            "set": self._set,
            "exit": self._exit,
        }
        if name not in commands:
            return f"no such command /{name}; there are {', '.join('/' + known for known in commands)}"
        return commands[name](rest.strip())

    def _reset(self, _: str) -> str:
        self.turns.clear()
        return "forgotten"

    def _system(self, text: str) -> str:
        self.system = text or None
        self.turns.clear()
        return "set; conversation cleared"

    def _set(self, text: str) -> str:
        if not text:
            return "\n".join(f"{name:<20}{getattr(self.sampling, name)}" for name in SETTABLE)
        name, _, value = text.replace("=", " ").partition(" ")
        if name not in SETTABLE:
            return f"no setting {name!r}; there are {', '.join(SETTABLE)}"
        try:
            number: Any = None if value.strip() in ("none", "null") else json.loads(value)
            self.sampling = dataclasses.replace(self.sampling, **dict[str, Any]({name: number}))
        except json.JSONDecodeError:
            return f"{name} must be a number, not {value.strip()!r}"
        except RequestError as error:
            return str(error)
        return f"{name} is {number}"

    def _exit(self, _: str) -> str:
        raise Leave
