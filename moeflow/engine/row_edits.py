"""Which changes of its logits a request asks for: bias, bans of stop tokens, penalties, the mask of a form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.request import Request
from moeflow.core.token_mask import TokenMask
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    from moeflow.kernels import logit_edits


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


def edits_of(rows: Sequence[SampledRow], places: Sequence[int], vocab_size: int) -> logit_edits.LogitEdits:
    """Return the changes of some rows.

    Order: logit_bias, min_tokens' ban of stop tokens, repetition, presence and frequency penalties, the mask of a form.
    """
    of_tokens = [_of_tokens(rows[place]) for place in places]
    masks = [_mask(rows[place], vocab_size) for place in places]
    given = [mask for mask in masks if mask is not None]
    has_mask = np.array([mask is not None for mask in masks], np.int32)
    counts = [len(tokens) for tokens, _ in of_tokens]
    return logit_edits.LogitEdits(
        rows=np.array(places, np.int32),
        places=np.stack(
            [
                np.repeat(np.arange(len(places), dtype=np.int32), counts),
                np.concatenate([tokens for tokens, _ in of_tokens]),
            ]
        ),
        amounts=np.concatenate([amounts for _, amounts in of_tokens], axis=1),
        mask_of=np.where(has_mask, np.cumsum(has_mask, dtype=np.int32) - 1, -1).astype(np.int32),
        masks=np.stack(given) if given else np.zeros((0, _mask_bytes(vocab_size)), np.uint8),
    )


def _of_tokens(row: SampledRow) -> tuple[NDArray[np.int32], logit_edits.Floats]:
    """Return the tokens that change alone, [n], each once, and by how much: bias, penalty and loss, [3, n]."""
    request, params = row.request, row.request.sampling
    barred = request.stop_token_ids if row.bars_stop and row.mask is None else frozenset()
    has_penalty = request.choice.repetition_penalty != 1.0
    seen = {*request.prompt_token_ids, *row.output_token_ids} if has_penalty else set()
    counts = Counter(row.output_token_ids) if params.presence_penalty or params.frequency_penalty else {}
    others = {*params.logit_bias, *barred, *counts} - seen
    tokens = np.fromiter(chain(seen, others), np.int32, len(seen) + len(others))
    amounts = np.zeros((3, len(tokens)), np.float32)
    bias, penalty, loss = amounts
    penalty[: len(seen)] = request.choice.repetition_penalty
    penalty[len(seen) :] = 1.0
    if params.logit_bias or barred or counts:
        at = dict(zip(chain(seen, others), range(len(tokens)), strict=True))
        bias[[at[token] for token in params.logit_bias]] = list(params.logit_bias.values())
        bias[[at[token] for token in barred]] = -np.inf
        occurrences = np.array(list(counts.values()), np.float32)
        lost = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * occurrences
        loss[[at[token] for token in counts]] = lost
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
