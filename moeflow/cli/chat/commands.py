"""What can be done in a chat beside asking: lines that begin with a slash.

Knows nothing of terminals: a command takes its text and returns what to show, or what to ask the model again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeflow.cli.chat.chat_backend import SETTABLE, ChatBackend
from moeflow.cli.chat.conversation import ChatHistory
from moeflow.cli.chat.transcript import Transcript, load, save
from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import CHOICE_FIELDS

HELP = f"""\
/retry             answer the last question again, in the place of its answer
/reset             forget what was said
/save FILE.md      keep the conversation as Markdown, or as JSON in FILE.json; the server's page imports both
/load FILE         go on with a conversation that was saved here or exported by the page; says if another model held it
/context           show how much of the model's context the conversation takes
/model [NAME]      go on with another model of the server; without NAME: list them
/system [TEXT]     tell the model who it is (and forget what was said); without TEXT: nobody
/set [NAME VALUE]  change how answers are chosen: {", ".join(SETTABLE)}; alone: show
/help              show this
/exit              leave; so do Ctrl-C and Ctrl-D at the prompt
A backslash at a line's end goes on in the next one; \"\"\" begins and ends a text of many lines.
Ctrl-C while an answer comes stops it."""


class Leave(Exception):
    """The user wants to go."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The last question is to be asked again."""

    question: str


class Commands:
    """The commands of one chat."""

    def __init__(self, conversation: ChatHistory, backend: ChatBackend) -> None:
        self._conversation = conversation
        self._backend = backend
        self._by_name: dict[str, Callable[[str], str | Retry]] = {
            "help": lambda _: HELP,
            "retry": self._retry,
            "reset": self._reset,
            "save": self._save,
            "load": self._load,
            "context": self._context,
            "model": self._model,
            "system": self._system,
            "set": self._set,
            "exit": self._exit,
        }

    def run(self, line: str) -> str | Retry:
        """Carry out a line that begins with a slash and return what to show.

        Raises: Leave, or as the backend does.
        """
        name, _, rest = line[1:].partition(" ")
        if name not in self._by_name:
            return f"no such command /{name}; there are {', '.join('/' + known for known in self._by_name)}"
        return self._by_name[name](rest.strip())

    def _retry(self, _: str) -> str | Retry:
        turns = self._conversation.turns
        return Retry(turns[-2]["content"]) if turns else "nothing was asked yet"

    def _reset(self, _: str) -> str:
        self._conversation.turns.clear()
        return "forgotten"

    def _save(self, text: str) -> str:
        if not text:
            return "name a file: /save FILE.md, or FILE.json"
        if not self._conversation.turns:
            return "nothing was said yet"
        path = Path(text).expanduser()
        try:
            save(path, Transcript(self._conversation.system, self._conversation.turns, self._backend.name))
        except (RequestError, OSError) as error:
            return f"not saved: {error}"
        return f"saved in {path}"

    def _load(self, text: str) -> str:
        if not text:
            return "name a file: /load FILE.md, or FILE.json"
        try:
            found = load(Path(text).expanduser())
        except (RequestError, OSError) as error:
            return f"not loaded: {error}"
        self._conversation.system, self._conversation.turns = found.system, found.turns
        last = f"; the last question was: {found.turns[-2]['content']}" if found.turns else ""
        return f"questions and answers: {len(found.turns) // 2}{last}{self._held_with(found.model)}"

    def _held_with(self, model: str | None) -> str:
        """Return what there is to say of the model that a conversation was held with; nothing if it answers here."""
        in_use = self._backend.name
        if model in (None, in_use):
            return ""
        way_back = f"; /model {model} goes back to it" if model in self._backend.model_names() else ""
        return f"\nit was held with {model}; now {in_use} answers{way_back}"

    def _context(self, _: str) -> str:
        conversation, count = self._conversation, self._backend.count_tokens
        contents = {role: [it["content"] for it in conversation.turns if it["role"] == role] for role in _ROWS}
        contents["system"] = [conversation.system] if conversation.system else []
        num_tokens = {_ROWS[role]: sum(map(count, texts)) for role, texts in contents.items()}
        used = count(conversation.messages(""))
        num_tokens["chat template"] = used - sum(num_tokens.values())  # below 0: it leaves something out
        lines = [f"{name:<18}{number:>8} tokens" for name, number in {**num_tokens, "together": used}.items()]
        if context := self._backend.max_model_len:
            lines.append(f"{'the context holds':<18}{context:>8} tokens, {used / context:.0%} are taken")
        return "\n".join(lines)

    def _model(self, name: str) -> str:
        if not name:
            in_use = self._backend.name
            return "\n".join(f"{'*' if it == in_use else ' '} {it}" for it in self._backend.model_names())
        try:
            self._backend.use(name)
        except RequestError as error:
            return str(error)
        return f"{name} answers from now on"

    def _system(self, text: str) -> str:
        self._conversation.system = text or None
        self._conversation.turns.clear()
        return "set; conversation cleared"

    def _set(self, text: str) -> str:
        conversation = self._conversation
        if not text:
            return "\n".join(f"{name:<20}{self._value(name)}" for name in SETTABLE)
        name, _, value = text.replace("=", " ").partition(" ")
        if name not in SETTABLE:
            return f"no setting {name!r}; there are {', '.join(SETTABLE)}"
        try:
            number: Any = None if value.strip() in ("none", "null") else json.loads(value)
            conversation.sampling = dataclasses.replace(conversation.sampling, **dict[str, Any]({name: number}))
        except json.JSONDecodeError:
            return f"{name} must be a number, not {value.strip()!r}"
        except RequestError as error:
            return str(error)
        return f"{name} is {number}"

    def _value(self, name: str) -> str:
        """Return a setting's value, or the model's default where the user has set none."""
        value = getattr(self._conversation.sampling, name)
        if value is not None or name not in CHOICE_FIELDS:
            return str(value)
        default = self._backend.sampling_defaults.get(name)
        return "the model's default" if default is None else f"{default} (the model's default)"

    def _exit(self, _: str) -> str:
        raise Leave


_ROWS = {"system": "system prompt", "user": "questions", "assistant": "answers"}
