"""What the target is asked, so that it says what it would say: pieces of text to go on with, and requests about them.

Knows no model: texts and a tokenizer in, token ids out, always the same ones for the same number.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.train.calibration_text import CALIBRATION_FOLDER

MIN_CHARACTERS: Final = 200  # of all text
MAX_FILE_BYTES: Final = 64 << 20
_MARK: Final = "What is it?"  # stands for what a user says
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
    """Return the user's text, or those that come with the package.

    Raises: ConfigError if it is no text, or too short.
    """
    files = sorted(CALIBRATION_FOLDER.glob("*.txt")) if file is None else [file]
    try:
        with_size = [(path, path.stat().st_size) for path in files]
        for path, size in with_size:
            if size > MAX_FILE_BYTES:
                raise ConfigError(f"{path} has {size:,} bytes; at most {MAX_FILE_BYTES:,} are read: take a part of it")
        texts = [path.read_text(encoding="utf-8-sig") for path in files]
    except OSError as error:
        raise ConfigError(f"cannot read the text {error.filename}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text; convert it first") from error
    if sum(map(len, texts)) < MIN_CHARACTERS:
        raise ConfigError(f"{file} has too little text: at least {MIN_CHARACTERS} characters are needed")
    return texts


def prompts(texts: Sequence[str], tokenizer: Tokenizer, *, max_tokens: int, seed: int) -> Iterator[list[int]]:
    """Yield prompts without end, each text as often as any other, of at most so many tokens."""
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
    """Return the tokens before and behind what a user says; None: the model is not for chats, or its template hides it.

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
    """Leave out what the cut left of a word, and of the last."""
    return piece.partition(" ")[2].rpartition(" ")[0].strip() or piece
