"""What is asked: pieces of real text, whose words stay with a subject, or noise, which has none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from moeflow.core.errors import ConfigError
from moeflow.text.tokenizer import Tokenizer
from studies.harness.needs import ROOT

WORKLOADS = ("text", "noise")


def default_texts() -> list[Path]:
    """Return the documents of this checkout that are prose."""
    return [ROOT / "README.md", *sorted(file for file in (ROOT / "docs").glob("**/*.md") if file.stem != "benchmarks")]


def cut_prompts(
    model: Path, files: Sequence[Path], workload: str, *, count: int, length: int, seed: int
) -> list[list[int]]:
    """Return prompts of so many tokens each, no two of which overlap. Raises: ConfigError if the text is too short."""
    chance = random.Random(seed)
    tokenizer = Tokenizer.load(model)
    if workload == "noise":
        return [[chance.randrange(tokenizer.vocab_size) for _ in range(length)] for _ in range(count)]
    pieces = []
    for file in files:
        tokens = tokenizer.encode(file.read_text(encoding="utf-8"))
        pieces += [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
    if len(pieces) < count:
        raise ConfigError(f"the text is enough for {len(pieces)} prompts of {length} tokens, not {count}: add --text")
    return chance.sample(pieces, count)
