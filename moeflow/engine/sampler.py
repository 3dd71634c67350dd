"""From logits to tokens: bias, penalties, temperature, top-k, top-p, min-p, one random number a row.

A row's token depends on that row alone, and its random number on its seed and output position. Greedy rows cost one
maximum; only rows whose logits a request edits are copied. A row with unusable logits fails alone. Knows nothing of
text, of passes or of stopping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from moeflow.core.engine_messages import TokenLogprobs
from moeflow.core.request import Request
from moeflow.core.sampling_params import MAX_LOGPROBS
from moeflow.core.token_mask import TokenMask
from moeflow.engine.random_numbers import uniform
from moeflow.kernels.arrays import Array, on_host
from moeflow.kernels.sample import Floats, RowSampling, likeliest, sample_rows
from moeflow.models.pass_input import PROMPT_CHUNK

_NOT_FINITE = "the model's logits are not finite numbers; float32 may help if the model runs in a smaller type"
_NOTHING_LEFT = "logit_bias, min_tokens and the form of the answer together bar every token"
MIN_TEMPERATURE = 1e-6  # below, 1/temperature overflows float32; all mass is on the likeliest token long before


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one row gave."""

    token_id: int  # -1 with an error
    error: str | None = None  # this row failed; the others are unharmed
    blames_request: bool = False  # with an error: the request asks for something that cannot be
    logprobs: TokenLogprobs | None = None  # if they were asked for


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


def sample(logits: Array, rows: Sequence[SampledRow]) -> list[SampledToken]:
    """Choose the token that follows each row's, without log-probabilities.

    Order: logit_bias, min_tokens' ban of stop tokens, repetition, presence and frequency penalties, the mask of a form,
    temperature, top-k, top-p, min-p. Then the inverse of the cumulative distribution at one uniform number.

    Shapes: logits [R, V] float32, one row each; not changed.
    """
    vocab_size = logits.shape[-1]
    edited = [place for place, row in enumerate(rows) if _is_edited(row)]
    samplings = [_sampling_of(row, place, vocab_size) for place, row in enumerate(rows)]
    for place in edited:
        samplings[place] = RowSampling(place)  # tells whether its logits are numbers
    chosen: list[int] = sample_rows(logits, samplings)
    failed = {place: _NOT_FINITE for place, token_id in enumerate(chosen) if token_id < 0}
    blamed = {place: row.mask.error for place, row in enumerate(rows) if row.mask is not None and row.mask.error}
    failed |= blamed
    if edited := [place for place in edited if place not in failed]:
        of_edited = _choose_edited(on_host(logits[edited]), [rows[place] for place in edited])
        blamed |= {place: _NOTHING_LEFT for place, token_id in zip(edited, of_edited, strict=True) if token_id < 0}
        failed |= blamed
        for place, token_id in zip(edited, of_edited, strict=True):
            chosen[place] = token_id
    return [
        SampledToken(-1, error=failed[place], blames_request=place in blamed)
        if place in failed
        else SampledToken(token_id)
        for place, token_id in enumerate(chosen)
    ]


def with_logprobs(logits: Array, sampled: Sequence[SampledToken], num_top: Sequence[int]) -> list[SampledToken]:
    """Return tokens with their log-probabilities, and those of as many of the likeliest as are asked for each.

    Shapes: logits [R, V] float32, one row a token; not changed.
    """
    logprobs = _logprobs(logits, [token.token_id for token in sampled], num_top)
    return [replace(token, logprobs=found) for token, found in zip(sampled, logprobs, strict=True)]


def prompt_logprobs(logits: Array, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the log-probability of each prompt token given those before it.

    Shapes: logits [P, V] float32; row i is the prediction of token_ids[i], so both exclude the first token.
    """
    result: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), PROMPT_CHUNK):
        chunk = list(token_ids[start : start + PROMPT_CHUNK])
        result += _logprobs(logits[start : start + PROMPT_CHUNK], chunk, [num_top] * len(chunk))
    return result


def _bars_stop(row: SampledRow) -> bool:
    return row.num_output < row.request.sampling.min_tokens and bool(row.request.stop_token_ids)


def _is_edited(row: SampledRow) -> bool:
    params = row.request.sampling
    return (
        bool(params.logit_bias)
        or row.mask is not None
        or _bars_stop(row)
        or row.request.choice.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _edit(logits: Floats, row: SampledRow) -> None:
    """Apply bias, ban and penalties in place. Shapes: logits [V]."""
    request, output_token_ids = row.request, row.output_token_ids
    params = request.sampling
    if params.logit_bias:
        logits[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    if row.mask is not None:
        _bar(logits, row.mask.allowed, request.stop_token_ids if _bars_stop(row) else ())
    elif _bars_stop(row):
        logits[list(request.stop_token_ids)] = -np.inf
    if request.choice.repetition_penalty != 1.0:
        seen = np.array([*request.prompt_token_ids, *output_token_ids])  # a token seen twice gets the same value twice
        values = logits[seen]
        penalty = np.float32(request.choice.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if output_token_ids and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output_token_ids)
        occurrences = np.array(list(counts.values()), np.float32)
        logits[list(counts)] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * occurrences


def _bar(logits: Floats, allowed: bytes, unwanted: Collection[int]) -> None:
    """Mask, in place, tokens that the form of an answer forbids, and unwanted tokens unless no others are left.

    Shapes: logits [V]; see `TokenMask` for `allowed`.
    """
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=len(logits), bitorder="little").view(np.bool_)
    if unwanted:
        others = bits.copy()
        others[list(unwanted)] = False
        bits = others if others.any() else bits
    np.copyto(logits, -np.inf, where=~bits)


def _choose_edited(logits: Floats, rows: list[SampledRow]) -> list[int]:
    """Edit logits [R, V] in place and choose from them; -1 where no token is left."""
    for row_logits, row in zip(logits, rows, strict=True):
        _edit(row_logits, row)
    return sample_rows(logits, [_sampling_of(row, place, logits.shape[-1]) for place, row in enumerate(rows)])


def _sampling_of(row: SampledRow, place: int, vocab_size: int) -> RowSampling:
    """Return how the token after a row's is to be chosen, from the logits at a place."""
    choice = row.request.choice
    if choice.temperature == 0.0:
        return RowSampling(place)
    return RowSampling(
        place,
        max(choice.temperature, MIN_TEMPERATURE),
        choice.top_k if 0 < choice.top_k < vocab_size else 0,
        choice.top_p,
        choice.min_p,
        uniform(row.request.seed, row.num_output),
    )


def _logprobs(logits: Array, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Report tokens under the model's own distribution. Shapes: logits [R, V]; one token and count a row."""
    # Row by row in float64, so that a row's numbers depend on nothing else.
    return [
        _logprobs_of_row(row, token_id, count)
        for row, token_id, count in zip(on_host(logits), token_ids, num_top, strict=True)
    ]


def _logprobs_of_row(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Shapes: logits [V]."""
    scores = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # logits that are not finite make no number here either
        scores -= scores.max()
        scores -= np.log(np.exp(scores).sum())
    chosen = scores[token_id]
    rank = int((scores > chosen).sum()) + 1
    # always as many, so that the order of equal tokens does not depend on how many are asked for
    top = likeliest(scores, MAX_LOGPROBS)[:num_top]
    return TokenLogprobs(token_id, _narrow(chosen), rank, [(int(token), _narrow(scores[token])) for token in top])


def _narrow(logprob: np.float64) -> float:
    """Return a number as float32 has it, which is as much as logits tell."""
    return float(np.float32(logprob))
