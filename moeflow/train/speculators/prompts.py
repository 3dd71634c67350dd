"""Prompts for the target: pieces of text to continue, and requests about them.

Knows no model: texts and a tokenizer in, token ids out. The same seed gives the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.calibration_text import CALIBRATION_FOLDER
from moeflow.train.text_file import read_text

MIN_CHARACTERS: Final = 200  # of all text
MAX_FILE_BYTES: Final = 64 << 20
_MARK: Final = "What is it?"  # in the place of a user's question
_PIECE_CHARACTERS: Final = (20, 400)
_REQUESTS: Final = (
    "{}",
    "Continue this text:\n\n{}",
    "Explain the following in simple words:\n\n{}",
    "Summarize the following text:\n\n{}",
    "Write a short story that begins like this:\n\n{}",
    "Rewrite the following more clearly:\n\n{}",
    "List the most important points of this:\n\n{}",
    "Answer a question that somebody could have about this text:\n\n{}",
)


def read_texts(file: Path | None) -> list[str]:
    """Return the user's text, or the texts of the package.

    Raises: ConfigError if the file is not text, too large or too short.
    """
    files = sorted(CALIBRATION_FOLDER.glob("*.txt")) if file is None else [file]
    if file is not None and file.is_file() and file.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{file} has more than {MAX_FILE_BYTES:,} bytes, the limit: use a part of it")
    texts = [read_text(path) for path in files]
    if sum(map(len, texts)) < MIN_CHARACTERS:
        raise ConfigError(f"{file} has too little text: use at least {MIN_CHARACTERS} characters")
    return texts


def prompts(texts: Sequence[str], tokenizer: Tokenizer, *, max_tokens: int, seed: int) -> Iterator[list[int]]:
    """Yield prompts without end. All texts are equally likely."""
    rng = random.Random(seed)
    while True:
        text = rng.choice(texts)
        length = rng.randint(*_PIECE_CHARACTERS)
        start = rng.randrange(max(len(text) - length, 1))
        piece = _from_a_word(text[start : start + length])
        form = rng.choice(_REQUESTS)
        as_request = tokenizer.has_chat_template and rng.random() < 0.75
        if as_request:
            token_ids = tokenizer.apply_chat_template([{"role": "user", "content": form.format(piece)}])
        else:
            token_ids = tokenizer.encode(piece)
        if 0 < len(token_ids) <= max_tokens:
            yield token_ids


def around_a_question(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the tokens before and after a user's question; None if the chat template has no such place.

    Raises: as `Tokenizer.apply_chat_template`.
    """
    if not tokenizer.has_chat_template:
        return None
    token_ids = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
    before, mark, behind = tokenizer.decode(token_ids, skip_special_tokens=False).partition(_MARK)
    if not (before and mark and behind):
        return None
    return (
        tokenizer.encode(before, add_special_tokens=False),
        tokenizer.encode(behind, add_special_tokens=False),
    )


def _from_a_word(piece: str) -> str:
    """Remove the incomplete first and last words."""
    return piece.partition(" ")[2].rpartition(" ")[0].strip() or piece
