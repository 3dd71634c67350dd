"""Which text a predictor learns from: pieces of the user's, or what the model itself says, round by round.

A round depends on its number and the seed alone, so that work that was stopped goes on with the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from moeflow.engine.engine import Engine
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.train.speculators.prompts import around_a_question, prompts, read_texts
from moeflow.train.speculators.teacher_text import QUESTION_TOKENS, say_round

ROUND_SEQUENCES: Final = 64
SEQUENCE_TOKENS: Final = 256  # of a piece, or of an answer, at most
_PIECE_CHARACTERS: Final = 4 * SEQUENCE_TOKENS
_PROMPT_TOKENS: Final = 192
_TEMPERATURE: Final = 0.8
_LEAST_CHAT: Final = 2 * QUESTION_TOKENS  # tokens of half a context, below which a model makes up no questions


class LearningText(Protocol):
    """Where sequences come from."""

    def round(self, number: int) -> list[list[int]]:
        """Return a round's sequences, of one token or more; none: there are no more. Blocks: while a model speaks."""


class UsersText:
    """Pieces of a file, or the first column of a .tsv line by line; each once, in an order that the seed decides."""

    def __init__(self, file: Path, tokenizer: Tokenizer, max_tokens: int, seed: int) -> None:
        """`max_tokens` is the longest context of the model. Raises: ConfigError if it is no text, or too short."""
        self._tokenizer, self._max_tokens = tokenizer, min(SEQUENCE_TOKENS, max_tokens)
        (text,) = read_texts(file)
        self._pieces = _inputs(text) if file.suffix == ".tsv" else _pieces(text)
        random.Random(seed).shuffle(self._pieces)

    def round(self, number: int) -> list[list[int]]:
        """See `LearningText.round`."""
        chosen = self._pieces[number * ROUND_SEQUENCES : (number + 1) * ROUND_SEQUENCES]
        sequences = [self._tokenizer.encode(piece)[: self._max_tokens] for piece in chosen]
        return [token_ids for token_ids in sequences if token_ids]


def _pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE_CHARACTERS] for at in range(0, len(text), _PIECE_CHARACTERS)]


def _inputs(table: str) -> list[str]:
    return [line.partition("\t")[0] for line in table.splitlines()]


class ModelsText:
    """What the model says, half of it about questions that it makes up, and as `moeflow train speculator` asks it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, seed: int, on_tokens: Callable[[int], None]) -> None:
        """on_tokens(num_tokens) is called after each pass that generates."""
        self._engine, self._tokenizer, self._seed, self._on_tokens = engine, tokenizer, seed, on_tokens
        self._longest = max(engine.config.scheduler.max_model_len // 2 - 1, 1)
        self._chat = around_a_question(tokenizer) if self._longest > _LEAST_CHAT else None
        self._texts = read_texts(None)

    def round(self, number: int) -> list[list[int]]:
        """See `LearningText.round`. Raises: EngineError if the model fails."""
        asked = prompts(
            self._texts,
            self._tokenizer,
            max_tokens=min(_PROMPT_TOKENS, self._longest),
            seed=self._seed * 1_000_003 + number,
        )
        said = say_round(
            self._engine,
            asked,
            number,
            chat=self._chat,
            max_tokens=min(SEQUENCE_TOKENS, self._longest),
            temperature=_TEMPERATURE,
            on_tokens=self._on_tokens,
        )
        return [said.token_ids[where].tolist() for where in said.sequences()]
