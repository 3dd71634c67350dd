"""Reads texts with labels: lines of `text<TAB>label`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from moeflow.core.errors import ConfigError
from moeflow.train.text_file import read_text

MAX_TOKENS: Final = 512  # of a text, as in T5's training; longer ones are cut
_FORM: Final = "each line is a text, a tab and a label of one word"


@dataclass(frozen=True, slots=True)
class LabelledText:
    """Texts and their classes. Shapes: token_ids, one [T] int64 a text, T >= 1; classes [texts] int64."""

    token_ids: list[Tensor]
    classes: Tensor

    def part(self, where: Sequence[int]) -> LabelledText:
        """Return some of the texts."""
        return LabelledText([self.token_ids[at] for at in where], self.classes[list(where)])


def read_lines(file: Path) -> list[tuple[str, str]]:
    """Return the texts of a file and their labels. Raises: ConfigError, which names the wrong line."""
    lines = read_text(file).split("\n")
    found = [_read_line(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ConfigError(f"{file} has no lines: {_FORM}")
    return found


def sorted_labels(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Return the sorted labels. The place of a label is its class."""
    return sorted({label for _, label in lines})


def labelled_text(
    file: Path, lines: Sequence[tuple[str, str]], labels: Sequence[str], encode: Callable[[str], list[int]]
) -> LabelledText:
    """Return token ids and classes. Raises: ConfigError if a label is unknown, or a text has no tokens."""
    place = {label: at for at, label in enumerate(labels)}
    token_ids = []
    for text, label in lines:
        if label not in place:
            raise ConfigError(f"{file} has the label {label!r}; the texts to learn from have {', '.join(labels)}")
        found = encode(text)[:MAX_TOKENS]
        if not found:
            raise ConfigError(f"{file}: {text!r} has no tokens. Remove the line")
        token_ids.append(torch.tensor(found))
    return LabelledText(token_ids, torch.tensor([place[label] for _, label in lines]))


def _read_line(file: Path, number: int, line: str) -> tuple[str, str]:
    text, tab, label = line.rstrip("\r").rpartition("\t")
    if not tab or not text.strip() or len(label.split()) != 1:
        raise ConfigError(f"{file}, line {number}: {_FORM}")
    return text, label.strip()
