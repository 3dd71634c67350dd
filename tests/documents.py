"""The documents, and the commands for their reader."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "studies" / "benchmarks.md"  # generated; its commands are those of measured commits
# Pages about the present: the log and `RESULTS` show past commands.
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(file for file in sorted(ROOT.glob("docs/**/*.md")) if file.name != "log.md" and file != RESULTS),
]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"\w?\$ ")  # "a$ " and "b$ " where there are two machines


@dataclass(frozen=True, slots=True)
class Command:
    """A line to type, without its prompt, and what the page shows that it prints."""

    line: str
    shown: str = ""


def commands_in_blocks(text: str) -> Iterator[Command]:
    """Yield the lines of sh blocks and the lines behind a prompt in other blocks, with continuation lines joined."""
    for language, block in _FENCED.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        if language == "sh":
            yield from (Command(line) for line in lines if line.strip())
            continue
        starts = [number for number, line in enumerate(lines) if _PROMPT.match(line)]
        for start, end in zip(starts, [*starts, len(lines)][1:], strict=True):
            yield Command(_PROMPT.sub("", lines[start], count=1), "\n".join(lines[start + 1 : end]))


def code_in_prose(text: str) -> list[str]:
    """Return the text between backticks outside of blocks."""
    return re.findall(r"`([^`\n]+)`", without_blocks(text))


def commands_in(text: str) -> list[str]:
    """Return all that may be typed: the commands in blocks, and code in prose."""
    return [*(command.line for command in commands_in_blocks(text)), *code_in_prose(text)]


def page_name(page: Path) -> str:
    """Return the path of a page in the project, for the names of tests."""
    return str(page.relative_to(ROOT))


def without_blocks(text: str) -> str:
    return _FENCED.sub("", text)


def documented_configuration() -> str:
    """Return the configuration file of the guide to running a server."""
    text = (ROOT / "docs" / "guides" / "run.md").read_text(encoding="utf-8")
    return next(block for language, block in _FENCED.findall(text) if language == "toml")
