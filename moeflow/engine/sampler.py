"""From logits to tokens: bias, penalties, temperature, top-k, top-p, min-p, one random number a row.

A row's token depends on that row alone, and its random number on its seed and output position. Greedy rows cost one
maximum; only rows whose logits a request edits are copied. A row with unusable logits fails alone. Knows nothing of
text, of passes or of stopping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from moeflow.core.engine_messages import TokenLogprobs
from moeflow.core.sampling_params import MAX_LOGPROBS
from moeflow.engine.random_numbers import uniform
from moeflow.engine.row_edits import SampledRow, edits_of
from moeflow.kernels.arrays import Array, ids_on, rows_of
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.sample import MIN_WEIGHT, NUCLEUS_WIDTH, RowSampling, sample_rows
from moeflow.kernels.triton import launching

with on_demand(__name__):
    from moeflow.engine import logprobs as token_logprobs
    from moeflow.kernels import device_sample, logit_edits
    from moeflow.kernels.triton import logit_edits as triton_logit_edits

_NOT_FINITE = "the model's logits are not finite numbers; float32 may help if the model runs in a smaller type"
_NOTHING_LEFT = "logit_bias, min_tokens and the form of the answer together bar every token"
MIN_TEMPERATURE: Final = 1e-6  # below, 1/temperature overflows float32; all mass is on the likeliest token long before


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one row gave."""

    token_id: int  # -1 with an error
    error: str | None = None  # this row failed; the others are unharmed
    blames_request: bool = False  # with an error: the request asks for something that cannot be
    logprobs: TokenLogprobs | None = None  # if they were asked for


class _Task(msgspec.Struct, frozen=True):
    """How the tokens after rows are chosen."""

    rows: Sequence[SampledRow]
    samplings: list[RowSampling]  # of each row; greedy for a changed one, to show that its logits are numbers
    changed: list[int]  # rows with changed logits,
    edits: logit_edits.LogitEdits | None  # the changes, if there are any,
    changed_samplings: list[RowSampling]  # and of each changed row, from changed logits

    @classmethod
    def of(cls, rows: Sequence[SampledRow], vocab_size: int) -> _Task:
        samplings = [_sampling_of(row, place, vocab_size) for place, row in enumerate(rows)]
        changed = [place for place, row in enumerate(rows) if row.is_edited]
        changed_samplings = [samplings[place]._replace(row=number) for number, place in enumerate(changed)]
        for place in changed:
            samplings[place] = RowSampling(place)
        edits = edits_of(rows, changed, vocab_size) if changed else None
        return cls(rows, samplings, changed, edits, changed_samplings)


def sample(logits: Array, rows: Sequence[SampledRow]) -> list[SampledToken]:
    """Choose the token that follows each row's.

    The changes of `edits_of` come first, then temperature, top-k, top-p, min-p. Then the inverse of the cumulative
    distribution at one uniform number. Tokens that a GPU samples have log-probabilities, where requests ask for them:
    the host waits for both at once.

    Shapes: logits [R, V] float32, one row each; not changed.
    """
    if not rows:
        return []
    task = _Task.of(rows, logits.shape[-1])
    is_on_device = launching.accepts(logits)
    chosen, of_changed, logprobs = (_on_device if is_on_device else _on_host)(logits, task)
    failed = {place: _NOT_FINITE for place, token_id in enumerate(chosen) if token_id < 0}
    blamed = {place: row.mask.error for place, row in enumerate(rows) if row.mask is not None and row.mask.error}
    failed |= blamed
    for place, token_id in zip(task.changed, of_changed, strict=True):
        chosen[place] = token_id
        if token_id < 0 and place not in failed:
            blamed[place] = failed[place] = _NOTHING_LEFT
    return [
        SampledToken(-1, error=failed[place], blames_request=place in blamed)
        if place in failed
        else SampledToken(token_id, logprobs=logprobs.get(place))
        for place, token_id in enumerate(chosen)
    ]


def _on_host(logits: Array, task: _Task) -> tuple[list[int], list[int], dict[int, TokenLogprobs]]:
    """Return the token of each row, that of each changed row, and no log-probabilities."""
    chosen = sample_rows(logits, task.samplings)
    if task.edits is None:
        return chosen, [], {}
    return chosen, sample_rows(logit_edits.edited(logits, task.edits), task.changed_samplings), {}


def _on_device(logits: Array, task: _Task) -> tuple[list[int], list[int], dict[int, TokenLogprobs]]:
    """Return the token of each row, that of each changed row, and by row the log-probabilities.

    Synchronizes as `device_sample.sample` does.
    """
    num_rows, samplings, rows = len(task.rows), task.samplings, logits
    if task.edits is not None:  # behind the others, so that both share launches
        rows = torch.cat([logits, triton_logit_edits.edited(logits, task.edits)])
        samplings = [*samplings, *(one._replace(row=num_rows + one.row) for one in task.changed_samplings)]
    num_top = {
        place: count for place, row in enumerate(task.rows) if (count := row.request.sampling.logprobs) is not None
    }
    of_changed = {place: num_rows + number for number, place in enumerate(task.changed)}
    asked = [of_changed.get(place, place) for place in num_top]  # numbers of samplings

    def logprobs_of(choices: device_sample.Choices) -> list[Array]:
        if not asked:
            return []
        tokens = choices.tokens[ids_on([choices.places[number] for number in asked], logits.device)]
        return [device_sample.logprobs(rows_of(logits, [*num_top]), tokens, MAX_LOGPROBS)]

    limits = device_sample.Limits(MIN_WEIGHT, NUCLEUS_WIDTH)
    tokens, found = device_sample.sample(rows, samplings, limits, logprobs_of)
    logprobs = (
        token_logprobs.of_device(found[0], [tokens[number] for number in asked], [*num_top.values()]) if asked else []
    )
    return tokens[:num_rows], tokens[num_rows:], dict(zip(num_top, logprobs, strict=True))


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
