"""Which text a predictor learns from: pieces of the user's, or what the model itself says, round by round.

A round depends on its number and the seed alone, so that work that was stopped goes on with the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.train.speculators.prompts import around_a_question, prompts, read_texts
from moeflow.train.speculators.teacher_text import QUESTION_TOKENS, answers, said, say_round

ROUND_SEQUENCES: Final = 64
SEQUENCE_TOKENS: Final = 256  # of a piece, or of an answer, at most
_PIECE_CHARACTERS: Final = 4 * SEQUENCE_TOKENS
_PROMPT_TOKENS: Final = 192
_REPLACED: Final = 0.2  # of the tokens of text that is made
_TEMPERATURE: Final = 0.8
_ANSWER_TOKENS: Final = 64  # of a decoder behind an encoder, at most
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


class MadeText:
    """Text that was found, with some tokens replaced by any others, as much as is asked for.

    A router's choice is mostly that of a token wherever it stands, and most tokens are rare: so more of them are seen,
    and between others than where they were found.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int, seed: int) -> None:
        """Take sequences, of which there is at least one, and how many tokens there are."""
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
    """The user's text as inputs of an encoder-decoder, each with what its decoder begins with and continues."""

    def __init__(self, inputs: UsersText, engine: Engine, seed: int, on_tokens: Callable[[int], None]) -> None:
        """on_tokens(num_tokens) is called after each pass that generates."""
        assert engine.model.encoder is not None
        self._inputs, self._engine, self._seed, self._on_tokens = inputs, engine, seed, on_tokens
        self._start = engine.model.encoder.decoder_start_token_id

    def round(self, number: int) -> list[tuple[list[int], list[int]]]:
        """Return a round's inputs and the decoder's tokens; none: there are no more. Raises: EngineError."""
        inputs = self._inputs.round(number)
        sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=_TEMPERATURE)
        outputs = answers(self._engine, inputs, sampling, self._seed * 1_000_003 + number, self._on_tokens)
        return [(asked, [self._start, *said(found)]) for asked, found in zip(inputs, outputs, strict=True)]


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
