"""Which changes of its logits a request asks for: bias, bans of stop tokens, penalties, the mask of a form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.request import Request
from moeflow.core.token_mask import TokenMask
from moeflow.kernels.logit_edits import Floats, LogitEdits

_NO_TOKENS: Final = np.zeros(0, np.int64)


class SampledRow(msgspec.Struct, frozen=True):
    """What a row of logits follows: a request's tokens, and perhaps drafted ones."""

    request: Request
    drafted: tuple[int, ...] = ()
    mask: TokenMask | None = None  # of the form that its answer must have

    @property
    def num_output(self) -> int:
        """Output tokens before this one."""
        return len(self.request.output_token_ids) + len(self.drafted)

    @property
    def output_token_ids(self) -> list[int]:
        """They themselves."""
        return [*self.request.output_token_ids, *self.drafted] if self.drafted else self.request.output_token_ids

    @property
    def bars_stop(self) -> bool:
        """Whether stop tokens may not come yet."""
        return self.num_output < self.request.sampling.min_tokens and bool(self.request.stop_token_ids)

    @property
    def is_edited(self) -> bool:
        """Whether the token does not follow from the model's own logits alone."""
        params = self.request.sampling
        return (
            bool(params.logit_bias)
            or self.mask is not None
            or self.bars_stop
            or self.request.choice.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )


def edits_of(rows: Sequence[SampledRow], places: Sequence[int], vocab_size: int) -> LogitEdits:
    """Return the changes of some rows.

    Order: logit_bias, min_tokens' ban of stop tokens, repetition, presence and frequency penalties, the mask of a form.
    """
    of_tokens = [_of_tokens(rows[place]) for place in places]
    masks = [_mask(rows[place], vocab_size) for place in places]
    given = [mask for mask in masks if mask is not None]
    has_mask = np.array([mask is not None for mask in masks], np.int32)
    counts = [len(tokens) for tokens, _ in of_tokens]
    return LogitEdits(
        rows=np.array(places, np.int32),
        places=np.stack(
            [
                np.repeat(np.arange(len(places), dtype=np.int32), counts),
                np.concatenate([tokens for tokens, _ in of_tokens]).astype(np.int32),
            ]
        ),
        amounts=np.concatenate([amounts for _, amounts in of_tokens], axis=1),
        mask_of=np.where(has_mask, np.cumsum(has_mask, dtype=np.int32) - 1, -1).astype(np.int32),
        masks=np.stack(given) if given else np.zeros((0, _mask_bytes(vocab_size)), np.uint8),
    )


def _of_tokens(row: SampledRow) -> tuple[NDArray[np.int64], Floats]:
    """Return the tokens that change alone, [n] ascending, and by how much: bias, penalty and loss, [3, n]."""
    request, params = row.request, row.request.sampling
    biased = np.array(list(params.logit_bias), np.int64)
    barred = np.array(list(request.stop_token_ids), np.int64) if row.bars_stop and row.mask is None else _NO_TOKENS
    has_penalty = request.choice.repetition_penalty != 1.0
    seen = np.array([*request.prompt_token_ids, *row.output_token_ids], np.int64) if has_penalty else _NO_TOKENS
    counts = Counter(row.output_token_ids) if params.presence_penalty or params.frequency_penalty else {}
    counted = np.array(list(counts), np.int64)
    tokens = np.unique(np.concatenate([biased, barred, seen, counted]))
    bias, penalty, loss = amounts = np.zeros((3, len(tokens)), np.float32)
    penalty[:] = 1.0
    bias[np.searchsorted(tokens, biased)] = list(params.logit_bias.values())
    bias[np.searchsorted(tokens, barred)] = -np.inf
    penalty[np.searchsorted(tokens, seen)] = request.choice.repetition_penalty
    occurrences = np.array(list(counts.values()), np.float32)
    loss[np.searchsorted(tokens, counted)] = (
        np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * occurrences
    )
    return tokens, amounts


def _mask(row: SampledRow, vocab_size: int) -> NDArray[np.uint8] | None:
    """Return the bits of tokens that the form of an answer allows, without stop tokens that may not come yet.

    These stay if no other token is left.
    """
    if row.mask is None:
        return None
    allowed = np.frombuffer(row.mask.allowed, np.uint8)[: _mask_bytes(vocab_size)]
    bits = np.pad(allowed, (0, _mask_bytes(vocab_size) - len(allowed)))
    if not row.bars_stop:
        return bits
    others = np.unpackbits(bits, count=vocab_size, bitorder="little")
    others[list(row.request.stop_token_ids)] = 0
    return np.packbits(others, bitorder="little") if others.any() else bits


def _mask_bytes(vocab_size: int) -> int:
    return -(-vocab_size // 8)
