"""The teacher's text as batches of whole sequences, in an order that depends on epoch and seed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moeflow.core.errors import ConfigError
from moeflow.train.examples import hold_out
from moeflow.train.speculators.teacher_text import UNKNOWN, TeacherText

BATCH_TOKENS: Final = 512
MAX_VOCABULARY: Final = 8192  # candidates of a student; rarer tokens cost more time than they save
_HELD_OUT_EVERY: Final = 16  # sequences
_MIN_SEQUENCES: Final = 4


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Sequences one after another.

    Shapes: token_ids [N]; places [R], each before a token of the target; next_places [R].
    """

    token_ids: Tensor
    lengths: list[int]
    places: Tensor  # rows of the batch
    next_places: Tensor  # rows of the whole text, of the next token


def split(text: TeacherText) -> tuple[list[slice], list[slice]]:
    """Return the sequences to learn from and the held-out ones. Raises: ConfigError if there are too few."""
    sequences = [where for where in text.sequences() if where.stop - where.start > 1]
    if len(sequences) < _MIN_SEQUENCES:
        raise ConfigError("the model generated too little text: allow more time (--minutes) or use other text (--data)")
    return hold_out(sequences, _HELD_OUT_EVERY)


def batches(text: TeacherText, sequences: Sequence[slice], order: Sequence[int]) -> Iterator[SequenceBatch]:
    """Yield the sequences in order, in batches of at least BATCH_TOKENS tokens."""
    group: list[slice] = []
    size = 0
    for place in order:
        group.append(sequences[place])
        size += sequences[place].stop - sequences[place].start
        if size >= BATCH_TOKENS:
            yield _batch(text, group)
            group, size = [], 0
    if group:
        yield _batch(text, group)


def vocabulary_of(text: TeacherText, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the most frequent tokens of texts and likeliest tokens, and the place of each token among them.

    Shapes: -> [v] int64, [V] int64 with -1 for all others.
    """
    known = text.likeliest[text.likeliest[:, 0] != UNKNOWN]
    counts = torch.bincount(known.flatten(), minlength=vocab_size) + torch.bincount(
        text.token_ids, minlength=vocab_size
    )
    number = min(MAX_VOCABULARY, int((counts > 0).sum()))
    chosen = counts.argsort(descending=True, stable=True)[:number].sort().values
    table = torch.full((vocab_size,), -1)
    table[chosen] = torch.arange(number)
    return chosen, table


def _batch(text: TeacherText, group: Sequence[slice]) -> SequenceBatch:
    rows = torch.cat([torch.arange(where.start, where.stop) for where in group])
    lengths = [where.stop - where.start for where in group]
    is_first = torch.cat([torch.arange(length) == 0 for length in lengths])
    is_next = (text.likeliest[rows, 0] != UNKNOWN) & ~is_first
    next_rows = is_next.nonzero()[:, 0]
    return SequenceBatch(text.token_ids[rows], lengths, next_rows - 1, rows[next_rows])
