"""Calls in an output, in the forms of their tools. The model writes all of them as JSON arguments."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

from moeflow.server.api.responses.offered_tools import INPUT, Called

_MAX_HEAD_PIECES: Final = 256  # of the JSON, until the input begins; other inputs come whole
_BEGIN: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Characters and whole escapes of a JSON string. Halves of a surrogate pair wait for each other.
_WHOLE: Final = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*'
)


class StreamedCall(ABC):
    """A call that the model is writing. One field of its item is made from the arguments."""

    prefix: ClassVar[str]  # of its id
    event: ClassVar[str | None]  # the name of its events; None: it has none
    field: ClassVar[str]

    def __init__(self, called: Called) -> None:
        self._called = called
        self._arguments: list[str] = []

    def fields(self) -> dict[str, Any]:
        """Return the other fields of the item."""
        named: dict[str, Any] = {"name": self._called.name}
        return named if self._called.namespace is None else {**named, "namespace": self._called.namespace}

    def push(self, arguments: str) -> str:
        """Take a piece of the JSON; return the new text of the field."""
        self._arguments.append(arguments)
        return arguments

    @abstractmethod
    def finish(self) -> tuple[str, Any]:
        """Return the text that is still to come, and the whole field."""

    def object(self) -> dict[str, Any]:
        """Return the arguments; none, if they are no object."""
        value = _parsed("".join(self._arguments))
        return value if isinstance(value, dict) else {}


class WrittenFunctionCall(StreamedCall):
    """A call of a function: its field is the JSON."""

    prefix, event, field = "fc", "response.function_call_arguments", "arguments"

    def finish(self) -> tuple[str, Any]:
        """See `StreamedCall`."""
        return "", "".join(self._arguments)


class WrittenCustomCall(StreamedCall):
    """A call of a custom tool: its field is the text of the argument."""

    prefix, event, field = "ctc", "response.custom_tool_call_input", "input"

    def __init__(self, called: Called) -> None:
        super().__init__(called)
        self._text: list[str] = []
        self._unread: str | None = None  # what follows the beginning of the text; None: it has not begun

    def push(self, arguments: str) -> str:
        """See `StreamedCall`."""
        super().push(arguments)
        if self._unread is not None:
            self._unread += arguments
        elif len(self._arguments) > _MAX_HEAD_PIECES or (begun := _BEGIN.match("".join(self._arguments))) is None:
            return ""
        else:
            self._unread = begun.string[begun.end() :]
        whole = _WHOLE.match(self._unread)
        read = "" if whole is None else whole[0]
        self._unread = self._unread[len(read) :]
        return self._add(json.loads(f'"{read}"', strict=False))

    def finish(self) -> tuple[str, Any]:
        """See `StreamedCall`. Arguments that are no object are the text itself."""
        said, text = "".join(self._text), _printable(_text_of("".join(self._arguments)))
        rest = self._add(text[len(said) :]) if text.startswith(said) else ""
        return rest, said + rest

    def _add(self, text: str) -> str:
        text = _printable(text)
        self._text.append(text)
        return text


class WrittenSearchCall(StreamedCall):
    """A search for tools that the client executes: its field is an object."""

    prefix, event, field = "tsc", None, "arguments"

    def fields(self) -> dict[str, Any]:
        """See `StreamedCall`."""
        return {"execution": "client"}

    def finish(self) -> tuple[str, Any]:
        """See `StreamedCall`."""
        return "", self.object()


class WrittenShellCall(StreamedCall):
    """A command for the user's shell: its field is an action."""

    prefix, event, field = "lsh", None, "action"

    def fields(self) -> dict[str, Any]:
        """See `StreamedCall`."""
        return {}

    def finish(self) -> tuple[str, Any]:
        """See `StreamedCall`."""
        given = self.object()
        command, env, timeout_ms = given.get("command"), given.get("env"), given.get("timeout_ms")
        folder = given.get("working_directory")
        return "", {
            "type": "exec",
            "command": _command(command),
            "env": {str(name): str(value) for name, value in env.items()} if isinstance(env, dict) else {},
            "timeout_ms": timeout_ms if isinstance(timeout_ms, int) else None,
            "user": None,
            "working_directory": folder if isinstance(folder, str) else None,
        }


_KINDS: Final[dict[str, type[StreamedCall]]] = {
    "function_call": WrittenFunctionCall,
    "custom_tool_call": WrittenCustomCall,
    "tool_search_call": WrittenSearchCall,
    "local_shell_call": WrittenShellCall,
}


def written_call(called: Called) -> StreamedCall:
    """Return an empty call of a tool."""
    return _KINDS[called.kind](called)


def called_as(item: dict[str, Any]) -> Called:
    """Return the form of a call in an output."""
    return Called(item["type"], item.get("name", item["type"]), item.get("namespace"))


def written_arguments(item: dict[str, Any]) -> str:
    """Return arguments from which a call in an output is made."""
    match item["type"]:
        case "function_call":
            return str(item["arguments"])
        case "custom_tool_call":
            return json.dumps({INPUT: item["input"]}, ensure_ascii=False)
    return json.dumps(item["action" if item["type"] == "local_shell_call" else "arguments"], ensure_ascii=False)


def _command(value: Any) -> list[str]:
    """Return a command as a list. A text is for the shell."""
    if isinstance(value, str):
        return ["bash", "-lc", value]
    return [str(part) for part in value] if isinstance(value, list) else []


def _text_of(written: str) -> str:
    """Return the input that arguments contain, however the model named it."""
    value = _parsed(written)
    if value is None:
        return "" if written.lstrip().startswith("{") else written
    if isinstance(value, dict):
        value = value.get(INPUT, next(iter(value.values())) if len(value) == 1 else value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parsed(written: str) -> Any:
    """Return the value of JSON; None for other texts."""
    try:
        return json.loads(written, strict=False)
    except (ValueError, RecursionError):
        return None


def _printable(text: str) -> str:
    """Return a text that UTF-8 can express: single surrogates are no characters."""
    return text.encode("utf-8", "replace").decode()
