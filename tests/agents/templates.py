"""Three kinds of chat templates: one that takes any conversation, and two that refuse some as known models' do.

Each is short, but keeps the structure, the tool syntax and the refusals of its kind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "agents" / "templates"


@dataclass(frozen=True, slots=True)
class TemplateKind:
    """A chat template, and how its model writes a call and reads a result."""

    source: str
    result_sign: str  # begins each result of a tool in a prompt
    call_format: str  # with one %s: an object of name and arguments

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a call as the model writes it."""
        return self.call_format % json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _source(*names: str) -> str:
    return "".join((FOLDER / f"{name}.jinja").read_text() for name in names)


_HERMES = ("<|im_start|>user\n<tool_response>", "<tool_call>\n%s\n</tool_call>")
TEMPLATES = {
    "chatml": TemplateKind(_source("chatml"), *_HERMES),
    "strict-system": TemplateKind(_source("strict-system", "chatml"), *_HERMES),
    "mistral": TemplateKind(_source("mistral"), "[TOOL_RESULTS]", "[TOOL_CALLS] [%s]"),
}
