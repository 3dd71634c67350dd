"""One pass as it was observed: which rows are whose, and what routers chose for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.batch import BatchEntry
from moeflow.core.request import Request
from moeflow.engine.observing.routing_tap import ExpertIds
from moeflow.engine.verification import Verified


class RowSpans(NamedTuple):
    """The rows of several sequences that a group of layers got, one after another."""

    starts: list[int]  # of each: position of its first row
    numbers: list[int]  # of each: how many rows


class ObservedPass(msgspec.Struct, frozen=True):
    """One pass."""

    entries: Sequence[BatchEntry]
    sampled: Mapping[Request, Verified]
    choices: Sequence[ExpertIds | None]  # of each group of layers, [layers, rows, K]; None: its routers were not asked
    num_rows: int  # drafted tokens included
    start_s: float
    duration_s: float
    stall_s: float
    read_bytes: int

    def kept(self, entry: BatchEntry) -> list[int]:
        """Return the accepted nodes of an entry's drafts: none if its token comes later."""
        verified = self.sampled.get(entry.request)
        return [] if verified is None else verified.kept


def whole_spans(entries: Sequence[BatchEntry]) -> RowSpans:
    """Return all rows of each entry; those of drafts follow."""
    return RowSpans([entry.start for entry in entries], [entry.num_tokens + len(entry.tree) for entry in entries])


def input_spans(entries: Sequence[BatchEntry]) -> RowSpans:
    """Return the rows of each entry that an encoder gets: an input as a whole, when it begins."""
    numbers = [entry.request.num_encoder_tokens if entry.start == 0 else 0 for entry in entries]
    return RowSpans([0] * len(entries), numbers)


def output_spans(entries: Sequence[BatchEntry], block_size: int) -> RowSpans:
    """Return the rows of each entry that the decoder of an encoder-decoder gets: behind the blocks of its input."""
    begins = [-(-entry.request.num_encoder_tokens // block_size) * block_size for entry in entries]
    starts = [max(entry.start, begin) for entry, begin in zip(entries, begins, strict=True)]
    return RowSpans(starts, [max(entry.stop - start, 0) for entry, start in zip(entries, starts, strict=True)])


def positions_of(entries: Sequence[BatchEntry], spans: RowSpans) -> NDArray[np.int64]:
    """Return the position of each row in its sequence; -1: the row is a drafted token. Shapes: -> [rows] int64."""
    numbers = np.array(spans.numbers, np.int64)
    ends = np.cumsum(numbers)
    positions: NDArray[np.int64] = np.arange(numbers.sum()) + np.repeat(spans.starts - (ends - numbers), numbers)
    for entry, end in zip(entries, ends.tolist(), strict=True):
        if entry.tree:
            positions[end - len(entry.tree) : end] = -1
    return positions


def first_rows(entries: Sequence[BatchEntry]) -> list[int]:
    """Return the first row of each entry in the pass."""
    return list(accumulate((entry.num_rows for entry in entries), initial=0))[:-1]
