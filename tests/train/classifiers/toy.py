"""Texts whose class is easily told, and a tiny model for their tokens."""

from __future__ import annotations

import random
from pathlib import Path

from tests.tiny_mixtral import write_tiny_mixtral

GOOD, BAD = ("fine", "bright", "lovely"), ("dull", "awful", "poor")


def write_texts(file: Path, num_texts: int, seed: int = 0) -> Path:
    """Write lines whose class is that of the one telling word among others."""
    chance = random.Random(seed)
    lines = []
    for number in range(num_texts):
        words = chance.choices(("the", "film", "was", "so", "and"), k=chance.randint(1, 6))
        words.insert(chance.randint(0, len(words)), chance.choice((BAD, GOOD)[number % 2]))
        lines.append(f"{' '.join(words)}\t{number % 2}\n")
    file.write_text("".join(lines), encoding="utf-8")
    return file


def write_model(folder: Path) -> Path:
    """Write a model whose tokens are bytes."""
    folder.mkdir()
    write_tiny_mixtral(folder)
    return folder
