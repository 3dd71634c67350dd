"""The session that every client is to complete: read a file, edit it, run a command, report.

Each client has tools of its own, so each has a table of calls. The prompt shows how many results have come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agents.templates import TemplateKind

BEFORE, AFTER = "the red fox\n", "the green fox\n"
COMMAND = "cat notes.txt > seen.txt && cat seen.txt"
FINAL = "The fox in notes.txt is green now."
TASK = f"In notes.txt, replace the word red by green. Then run the command `{COMMAND}`."
TITLE = "Repaint the fox"  # the answer to all other requests: titles, summaries


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of the client's tools."""

    name: str
    arguments: dict[str, Any]


def scripted_answers(template: TemplateKind, calls: Sequence[Call], final: str = FINAL) -> Callable[[str], str]:
    """Return the model: its answer to a prompt is the first call whose result is not there yet, at last `final`."""

    def answer(prompt: str) -> str:
        num_results = prompt.count(template.result_sign)
        if TASK not in prompt or (num_results < len(calls) and calls[num_results].name not in prompt):
            return TITLE
        if num_results >= len(calls):
            return final
        return template.call(calls[num_results].name, calls[num_results].arguments)

    return answer


def begin(folder: Path) -> None:
    """Write the file of a session into an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "notes.txt").write_text(BEFORE)


def missing(folder: Path) -> str:
    """Return the part of a session that did not happen; "": it is complete."""
    if (folder / "notes.txt").read_text() != AFTER:
        return "notes.txt was not edited"
    seen = folder / "seen.txt"
    if not seen.is_file() or seen.read_text() != AFTER:
        return "the command did not run after the edit"
    return ""
