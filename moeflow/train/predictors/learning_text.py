"""Sources of text for a predictor: pieces of the user's file, the model's own text, and variants of both.

A round depends on its number and the seed alone, so that resumed work has the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.speculators.prompts import read_texts
from moeflow.train.speculators.teacher_text import Teacher, answers, half_context, said

ROUND_SEQUENCES: Final = 64
SEQUENCE_TOKENS: Final = 256  # of a piece or an answer, at most
_PIECE_CHARACTERS: Final = 4 * SEQUENCE_TOKENS
_REPLACED: Final = 0.2  # of a variant's tokens
_TEMPERATURE: Final = 0.8
_ANSWER_TOKENS: Final = 64  # of an encoder-decoder, at most

Source = Callable[[int], list[list[int]]]  # round number -> sequences of one token or more; [] after the last
OnTokens = Callable[[int], None]  # the tokens of each pass


def users_text(file: Path, engine: Engine, seed: int) -> Source:
    """Return the pieces of a file, or the first column of each line of a .tsv; each once, in random order.

    Raises: ConfigError if the file is not text, or too short.
    """
    (text,) = read_texts(file)
    pieces = [text[at : at + _PIECE_CHARACTERS] for at in range(0, len(text), _PIECE_CHARACTERS)]
    if file.suffix == ".tsv":
        pieces = [line.partition("\t")[0] for line in text.splitlines()]
    random.Random(seed).shuffle(pieces)
    tokenizer, encoder = Tokenizer.load(engine.config.model_path), engine.model.encoder
    longest = min(SEQUENCE_TOKENS, engine.model.max_model_len if encoder is None else encoder.max_input_tokens)

    def sequences(number: int) -> list[list[int]]:
        chosen = pieces[number * ROUND_SEQUENCES : (number + 1) * ROUND_SEQUENCES]
        return [token_ids for piece in chosen if (token_ids := tokenizer.encode(piece)[:longest])]

    return sequences


def models_text(engine: Engine, seed: int, on_tokens: OnTokens) -> Source:
    """Return the model's own text, prompted as by `moeflow train speculator`. A round raises EngineError."""
    answer_tokens = min(SEQUENCE_TOKENS, half_context(engine))
    teacher = Teacher(
        engine,
        read_texts(None),
        answer_tokens=answer_tokens,
        temperature=_TEMPERATURE,
        seed=seed,
        on_tokens=on_tokens,
    )

    def sequences(number: int) -> list[list[int]]:
        text = teacher.round(number)
        return [text.token_ids[where].tolist() for where in text.sequences()]

    return sequences


def variants(sequences: Sequence[Sequence[int]], vocab_size: int, seed: int) -> Source:
    """Return variants of at least one sequence, without end, with some tokens replaced at random.

    Routing depends mostly on the token itself, and most tokens are rare. Variants show more of them, in new contexts.
    """

    def replaced(number: int) -> list[list[int]]:
        chance = random.Random(seed * 1_000_003 + number)
        chosen = chance.sample(sequences, min(ROUND_SEQUENCES, len(sequences)))
        return [
            [chance.randrange(vocab_size) if chance.random() < _REPLACED else token for token in token_ids]
            for token_ids in chosen
        ]

    return replaced


def decoder_answers(
    engine: Engine, inputs: Sequence[list[int]], seed: int, on_tokens: OnTokens
) -> list[tuple[list[int], list[int]]]:
    """Return inputs of an encoder-decoder, each with the decoder's start token and answer. Raises: EngineError."""
    assert engine.model.encoder is not None
    start = engine.model.encoder.decoder_start_token_id
    sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=_TEMPERATURE)
    outputs = answers(engine, inputs, sampling, seed, on_tokens)
    return [(asked, [start, *said(found)]) for asked, found in zip(inputs, outputs, strict=True)]
