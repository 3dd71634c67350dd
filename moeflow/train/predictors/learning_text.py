"""Sources of text for a predictor: pieces of the user's file, or the model's own text, round by round.

A round depends on its number and the seed alone, so that resumed work has the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.train.speculators.prompts import read_texts
from moeflow.train.speculators.teacher_text import Teacher, answers, half_context, said

ROUND_SEQUENCES: Final = 64
SEQUENCE_TOKENS: Final = 256  # of a piece or an answer, at most
_PIECE_CHARACTERS: Final = 4 * SEQUENCE_TOKENS
_REPLACED: Final = 0.2  # of a variant's tokens
_TEMPERATURE: Final = 0.8
_ANSWER_TOKENS: Final = 64  # of an encoder-decoder, at most


class LearningText(Protocol):
    """A source of sequences."""

    def round(self, number: int) -> list[list[int]]:
        """Return a round's sequences of one token or more; [] after the last. Blocks: while a model generates."""


class UsersText:
    """Pieces of a file, or the first column of each line of a .tsv; each once, in random order."""

    def __init__(self, file: Path, tokenizer: Tokenizer, max_tokens: int, seed: int) -> None:
        """`max_tokens` is the model's context. Raises: ConfigError if the file is not text, or too short."""
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


class MadeText:
    """Variants of sequences with some tokens replaced at random, without end.

    Routing depends mostly on the token itself, and most tokens are rare. Variants show more of them, in new contexts.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int, seed: int) -> None:
        """There is at least one sequence."""
        self._sequences, self._vocab_size, self._seed = sequences, vocab_size, seed

    def round(self, number: int) -> list[list[int]]:
        """See `LearningText.round`."""
        chance = random.Random(self._seed * 1_000_003 + number)
        chosen = chance.sample(self._sequences, min(ROUND_SEQUENCES, len(self._sequences)))
        return [
            [chance.randrange(self._vocab_size) if chance.random() < _REPLACED else token for token in token_ids]
            for token_ids in chosen
        ]


class AnsweredText:
    """The user's text as inputs of an encoder-decoder, each with the decoder's start token and answer."""

    def __init__(self, inputs: UsersText, engine: Engine, seed: int, on_tokens: Callable[[int], None]) -> None:
        """on_tokens(num_tokens) is called after each pass."""
        assert engine.model.encoder is not None
        self._inputs, self._engine, self._seed, self._on_tokens = inputs, engine, seed, on_tokens
        self._start = engine.model.encoder.decoder_start_token_id

    def round(self, number: int) -> list[tuple[list[int], list[int]]]:
        """Return a round's inputs and the decoder's tokens; [] after the last. Raises: EngineError."""
        inputs = self._inputs.round(number)
        sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=_TEMPERATURE)
        outputs = answers(self._engine, inputs, sampling, self._seed * 1_000_003 + number, self._on_tokens)
        return [(asked, [self._start, *said(found)]) for asked, found in zip(inputs, outputs, strict=True)]


class ModelsText:
    """The model's own text, prompted as by `moeflow train speculator`."""

    def __init__(self, engine: Engine, seed: int, on_tokens: Callable[[int], None]) -> None:
        """on_tokens(num_tokens) is called after each pass."""
        self._teacher = Teacher(
            engine,
            read_texts(None),
            answer_tokens=min(SEQUENCE_TOKENS, half_context(engine)),
            temperature=_TEMPERATURE,
            seed=seed,
            on_tokens=on_tokens,
        )

    def round(self, number: int) -> list[list[int]]:
        """See `LearningText.round`. Raises: EngineError if the model fails."""
        text = self._teacher.round(number)
        return [text.token_ids[where].tolist() for where in text.sequences()]
