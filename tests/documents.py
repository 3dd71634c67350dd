"""The documents, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Pages of what there is now: `docs/LOG.md` tells of what there was.
PAGES = [*sorted(ROOT.glob("*.md")), *(file for file in sorted(ROOT.glob("docs/*.md")) if file.name != "LOG.md")]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"\w?\$ ")  # "a$ " and "b$ " where there are two machines


@dataclass(frozen=True, slots=True)
class Command:
    """A line to type, without its prompt, and what the page shows that it prints."""

    line: str
    shown: str = ""


def commands_in_blocks(text: str) -> Iterator[Command]:
    """Yield the lines of sh blocks and of prompts in other blocks, with continuation lines joined."""
    for language, block in _FENCED.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        if language == "sh":
            yield from (Command(line) for line in lines if line.strip())
            continue
        starts = [number for number, line in enumerate(lines) if _PROMPT.match(line)]
        for start, end in zip(starts, [*starts, len(lines)][1:], strict=True):
            yield Command(_PROMPT.sub("", lines[start], count=1), "\n".join(lines[start + 1 : end]))


def code_in_prose(text: str) -> list[str]:
    """Return texts between backticks outside of blocks."""
    return re.findall(r"`([^`\n]+)`", without_blocks(text))


def commands_in(text: str) -> list[str]:
    """Return all that may be typed: the commands in blocks, and code in prose."""
    return [*(command.line for command in commands_in_blocks(text)), *code_in_prose(text)]


def without_blocks(text: str) -> str:
    return _FENCED.sub("", text)


def documented_configuration() -> str:
    """Return the configuration file that the page of operations shows."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    return next(block for language, block in _FENCED.findall(text) if language == "toml")
