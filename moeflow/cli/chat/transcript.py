"""Conversations in files: the Markdown and the JSON that the server's page exports and imports.

A system prompt is kept, too. So is the name of the conversation's model, in Markdown as a
comment before the messages. Of the page's versions of messages the chosen ones are read.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moeflow.cli.chat.chat_backend import Messages
from moeflow.core.errors import RequestError

FORMAT = "moeflow-conversations"
VERSION = 1
MARK = re.compile(r"<!-- moeflow: (system|user|assistant) -->")
MODEL = re.compile(r"<!-- moeflow: model (.+) -->")
ESCAPED = re.compile(r"\\*<!-- moeflow: ")  # begins a line that would read as a mark: one more backslash before it
NAMES = {"system": "System prompt", "user": "You", "assistant": "Answer"}
ROLES = ("user", "assistant")
MAX_TITLE_LEN = 60  # characters
NEWLINE = "\n"


@dataclass(frozen=True, slots=True)
class Transcript:
    """The saved part of a conversation. The turns alternate user, assistant, and end with an answer."""

    system: str | None = None
    turns: Messages = field(default_factory=list)
    model: str | None = None  # that it was held with; None: the file does not say


def save(path: Path, transcript: Transcript) -> None:
    """Write a conversation, in the form that the file's name ends with; an earlier conversation is replaced.

    Raises: RequestError if the name has no such ending, or if there is a file that is no conversation; OSError.
    """
    write = _write_json if _is_json(path) else _write_markdown
    if path.exists() and path.stat().st_size:
        try:
            load(path)
        except RequestError:
            raise RequestError(f"{path} exists and is no conversation; name another file") from None
    path.write_text(write(transcript), encoding="utf-8", newline="\n")


def load(path: Path) -> Transcript:
    """Read a conversation; of several in a JSON file the one that was changed last.

    Raises: RequestError if the file holds none; OSError.
    """
    read = _read_json if _is_json(path) else _read_markdown
    try:
        found = read(path.read_text(encoding="utf-8-sig"))
        return replace(found, turns=_complete(found.turns))
    except UnicodeDecodeError:
        raise RequestError(f"{path} is no text in UTF-8") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = error.args[0] if type(error) is ValueError else "it holds no conversation that the page would export"
        raise RequestError(f"{path} cannot be read: {why}") from None


def _is_json(path: Path) -> bool:
    if path.suffix.lower() not in (".json", ".md", ".markdown"):
        raise RequestError(f"{path}: the name must end in .md for Markdown or in .json for JSON")
    return path.suffix.lower() == ".json"


def _complete(turns: Messages) -> Messages:
    """Return the turns without an unanswered last question."""
    if [turn["role"] for turn in turns] != [ROLES[number % 2] for number in range(len(turns))]:
        raise ValueError("questions and answers do not take turns in it")
    if not turns:
        raise ValueError("it holds no messages")
    return turns[: len(turns) // 2 * 2]


def _title(transcript: Transcript) -> str:
    text = transcript.turns[0]["content"].strip() if transcript.turns else ""
    return text.split("\n")[0][:MAX_TITLE_LEN] or "New conversation"


def _write_markdown(transcript: Transcript) -> str:
    opening = [{"role": "system", "content": transcript.system}] if transcript.system else []
    parts = [
        f"<!-- moeflow: {it['role']} -->\n**{NAMES[it['role']]}:**\n\n{_escape(it['content'])}\n"
        for it in (*opening, *transcript.turns)
    ]
    model = [f"<!-- moeflow: model {transcript.model} -->\n"] if transcript.model else []
    return "\n".join([f"# {_title(transcript)}\n", *model, *parts])


def _read_markdown(text: str) -> Transcript:
    messages: list[tuple[str, list[str]]] = []
    model = None
    for line in text.replace("\r\n", "\n").split("\n"):
        if mark := MARK.fullmatch(line):
            messages.append((mark[1], []))
        elif messages:
            messages[-1][1].append(line)
        elif named := MODEL.fullmatch(line):
            model = named[1]
    turns, system = [], None
    for role, lines in messages:
        end = -1 if lines and not lines[-1] else None
        content = _unescape("\n".join(lines[2:end]))  # its name and an empty line before it, one behind it
        if role == "system":
            system = content
        else:
            turns.append({"role": role, "content": content})
    return Transcript(system, turns, model)


def _escape(content: str) -> str:
    return "\n".join("\\" + line if ESCAPED.match(line) else line for line in content.split("\n"))


def _unescape(content: str) -> str:
    return "\n".join(
        line[1:] if line.startswith("\\") and ESCAPED.match(line) else line for line in content.split("\n")
    )


def _write_json(transcript: Transcript) -> str:
    messages: list[dict[str, Any]] = []
    for turn in transcript.turns:
        parent = messages[-1]["id"] if messages else ""
        files: dict[str, Any] = {"files": []} if turn["role"] == "user" else {}
        messages.append({"id": secrets.token_hex(12), "parent": parent, **turn, **files})
    record = {
        "id": secrets.token_hex(12),
        "title": _title(transcript),
        "model": transcript.model or "",
        "system": transcript.system,
        "updatedAt": time.time_ns() // 10**6,
        "chosen": {message["parent"]: message["id"] for message in messages},
        "messages": messages,
    }
    document = {"format": FORMAT, "version": VERSION, "conversations": [record]}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _read_json(text: str) -> Transcript:
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError("it is not JSON; it may be cut off") from None
    if document["format"] != FORMAT:
        raise ValueError("it holds no conversations of moeflow's")
    if document["version"] != VERSION:
        raise ValueError(f"it is of version {document['version']}; this program reads version {VERSION}")
    record = max(document["conversations"], key=lambda it: float(it.get("updatedAt") or 0))
    turns = [{"role": message["role"], "content": _content(message)} for message in _chosen_path(record)]
    system, model = record.get("system"), record.get("model")
    return Transcript(None if system is None else str(system), turns, str(model) if model else None)


def _chosen_path(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that the page would show: of each group of versions the chosen one, else the last."""
    versions: dict[str, dict[str, dict[str, Any]]] = {}
    for message in record["messages"]:
        versions.setdefault(message["parent"], {})[message["id"]] = message
    path, parent, chosen = [], "", record.get("chosen") or {}
    while group := versions.pop(parent, None):
        message = group.get(chosen.get(parent, "")) or list(group.values())[-1]
        path.append(message)
        parent = message["id"]
    return path


def _content(message: dict[str, Any]) -> str:
    """Return a message's text as the page sends it: attachments first."""
    content = message["content"]
    if not isinstance(content, str):
        raise ValueError("a message in it has no text")
    files = [_fenced(str(file["name"]), str(file["text"])) for file in message.get("files") or ()]
    return "\n\n".join(filter(None, [*files, content]))


def _fenced(name: str, text: str) -> str:
    fence = "`" * (max(2, *map(len, re.findall("`+", text)), 0) + 1)
    return f"File {name}:\n{fence}\n{text.removesuffix(NEWLINE)}\n{fence}"
