"""Names of models on a hub: OWNER/REPOSITORY, and perhaps a revision and one GGUF file of it.

Qwen/Qwen3-30B-A3B                          a folder of safetensors, as the branch `main` has it
Qwen/Qwen3-30B-A3B@refs/pr/7                another branch, tag or commit
Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M              the GGUF file with this tag of its quantization
Qwen/Qwen3-30B-A3B-GGUF:some-file.gguf      the file of this name
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from moeflow.core.truncated_repr import truncated_repr

MAIN: Final = "main"  # the revision, if none is named

_PREFIX = re.compile(r"hf://|(https://)?(huggingface\.co|hf\.co)/")  # as people copy names from pages and other tools
_WORD: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?(?::(?P<file>[A-Za-z0-9][\w./+-]*))?", re.ASCII
)
_MAX_REPO = 96  # characters, on the public hub


@dataclass(frozen=True, slots=True)
class ModelName:
    """What a name says. `file` is a GGUF file's name or the tag of its quantization; empty: what the repository has."""

    repo: str
    revision: str = MAIN
    file: str = ""
    names_main: bool = field(default=False, compare=False)  # `@main` was written, which means the same model

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo}{revision}{':' if self.file else ''}{self.file}"


def parse_model_name(text: str) -> ModelName | None:
    """Return what a name says; None: the text is no name of a model on a hub.

    No name leads out of a folder that its parts are put into.
    """
    prefix = _PREFIX.match(text)
    match = _NAME.fullmatch(text, prefix.end() if prefix else 0)
    if match is None or ".." in text or "--" in match["repo"] or len(match["repo"]) > _MAX_REPO:
        return None
    revision = match["revision"]
    return ModelName(match["repo"], revision or MAIN, match["file"] or "", names_main=revision == MAIN)


def no_name(text: str) -> str:
    """Return the message for a text that is no name of a model on a hub."""
    return f"{truncated_repr(text)} is no model's name: OWNER/NAME, OWNER/NAME:TAG or OWNER/NAME@REVISION"
