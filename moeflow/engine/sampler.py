"""From logits to tokens: bias, penalties, temperature, top-k, top-p, min-p, one random number a row.

A row's token depends on that row alone: rows are only computed together when the same operation of the same
size applies to each, and a row's random number comes from its seed and output position. Greedy rows cost one
maximum. A row with unusable logits fails alone. Knows nothing of text, of passes or of stopping.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.core.request import Request
from moeflow.core.sampling_params import MAX_LOGPROBS, SamplingParams
from moeflow.engine.messages import TokenLogprobs
from moeflow.engine.random_numbers import uniform
from moeflow.kernels.largest import largest

NUCLEUS_WIDTH = 1024  # likeliest tokens that top-p looks at before it sorts a whole row: 8x cheaper at V = 49152
MIN_TEMPERATURE = 1e-6  # below, 1/temperature overflows float32; all mass is on the likeliest token long before
PROMPT_CHUNK = 64  # rows of prompt log-probabilities at a time: bounds the copy of [P, V]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one row gave."""

    token_id: int  # -1 with an error
    logprobs: TokenLogprobs | None = None  # if the request asks for them
    error: str | None = None  # this row failed; the others are unharmed


def sample(logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
    """Choose the next token of each request.

    Order: logit_bias, min_tokens' ban of stop tokens, repetition, presence and frequency penalties,
    temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution at one uniform number.

    Shapes: logits [R, V] float32, one row a request; not changed.
    """
    values, indices = largest(logits)  # a NaN anywhere in a row makes its maximum NaN
    token_ids: list[int] = indices.tolist()
    failed = {
        row: "the model's logits are not finite numbers; float32 may help if the model runs in a smaller type"
        for row, value in enumerate(values.tolist())
        if not math.isfinite(value)
    }
    shaped = [row for row, request in enumerate(requests) if row not in failed and not _takes_likeliest(request)]
    if shaped:
        shaped_logits = logits[shaped]
        for row_logits, row in zip(shaped_logits, shaped, strict=True):
            _edit(row_logits, requests[row])
        for row, token_id in zip(shaped, _choose(shaped_logits, [requests[row] for row in shaped]), strict=True):
            if token_id is None:
                failed[row] = "logit_bias and min_tokens together bar every token"
            else:
                token_ids[row] = token_id

    asking = [r for r, request in enumerate(requests) if request.sampling.logprobs is not None and r not in failed]
    num_top = [requests[row].sampling.logprobs or 0 for row in asking]
    logprobs = dict(zip(asking, _logprobs(logits[asking], [token_ids[row] for row in asking], num_top), strict=True))
    return [
        SampledToken(-1, error=failed[row]) if row in failed else SampledToken(token_ids[row], logprobs.get(row))
        for row in range(len(requests))
    ]


def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the log-probability of each prompt token given those before it.

    Shapes: logits [P, V] float32; row i is the prediction of token_ids[i], so both exclude the first token.
    """
    result: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), PROMPT_CHUNK):
        chunk = list(token_ids[start : start + PROMPT_CHUNK])
        result += _logprobs(logits[start : start + PROMPT_CHUNK], chunk, [num_top] * len(chunk))
    return result


def _takes_likeliest(request: Request) -> bool:
    """Whether the raw logits' maximum is the answer."""
    return request.sampling.is_greedy and not _is_edited(request)


def _bars_stop(request: Request) -> bool:
    return len(request.output_token_ids) < request.sampling.min_tokens and bool(request.stop_token_ids)


def _is_edited(request: Request) -> bool:
    params = request.sampling
    return (
        bool(params.logit_bias)
        or _bars_stop(request)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _edit(logits: Tensor, request: Request) -> None:
    """Apply bias, ban and penalties in place. Shapes: logits [V]."""
    params, device = request.sampling, logits.device
    if params.logit_bias:
        logits[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), device=device)
    if _bars_stop(request):
        logits[list(request.stop_token_ids)] = -torch.inf
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*request.prompt_token_ids, *request.output_token_ids}), device=device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if request.output_token_ids and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(request.output_token_ids)
        occurrences = torch.tensor(list(counts.values()), dtype=logits.dtype, device=device)
        logits[list(counts)] -= params.presence_penalty + params.frequency_penalty * occurrences


def _choose(logits: Tensor, requests: list[Request]) -> list[int | None]:
    """Choose from edited logits [R, V]; None where no token is left. Changes the logits."""
    values, indices = largest(logits)
    chosen: list[int | None] = list(indices.tolist())
    groups: dict[int, list[int]] = defaultdict(list)  # effective top-k -> rows
    for row, (request, value) in enumerate(zip(requests, values.tolist(), strict=True)):
        if not math.isfinite(value):
            chosen[row] = None
        elif not request.sampling.is_greedy:
            groups[_effective_top_k(request.sampling, logits.shape[-1])].append(row)

    logits -= values[:, None]
    for top_k, rows in groups.items():
        params = [requests[row].sampling for row in rows]
        temperatures = [max(p.temperature, MIN_TEMPERATURE) for p in params]
        scores = logits[rows] / torch.tensor(temperatures, device=logits.device)[:, None]
        numbers = [uniform(requests[row].seed, len(requests[row].output_token_ids)) for row in rows]
        for row, token_id in zip(rows, _draw(scores, top_k, params, numbers), strict=True):
            chosen[row] = token_id
    return chosen


def _effective_top_k(params: SamplingParams, vocab_size: int) -> int:
    """Return top-k; 0: all tokens in vocabulary order will do; -1: all tokens, likeliest first, for top-p."""
    if 0 < params.top_k < vocab_size:
        return params.top_k
    return -1 if params.top_p < 1.0 else 0


def _draw(scores: Tensor, top_k: int, params: list[SamplingParams], numbers: list[float]) -> list[int]:
    """Draw a token for each row of scores [R, V]: log-probabilities up to a constant, 0 the likeliest."""
    if top_k > 0:
        values, token_ids = scores.topk(top_k)
        weights = values.exp().double()
        return _draw_sorted(weights, token_ids, weights.sum(-1), params, numbers)
    if top_k < 0:
        return _draw_nucleus(scores, params, numbers)
    weights = scores.exp_()
    min_p = _column([p.min_p for p in params], weights)
    if bool(min_p.any()):
        weights.masked_fill_(weights < min_p, 0.0)
    return _invert(weights, numbers).tolist()


def _draw_nucleus(scores: Tensor, params: list[SamplingParams], numbers: list[float]) -> list[int]:
    """Draw under top-p over the whole vocabulary, sorting a row only if its nucleus is wide."""
    mass = scores.exp().sum(-1, dtype=torch.float64)
    values, token_ids = scores.topk(min(NUCLEUS_WIDTH, scores.shape[-1]))
    weights = values.exp().double()
    drawn = _draw_sorted(weights, token_ids, mass, params, numbers)
    is_wide = weights.sum(-1) < mass * _column([p.top_p for p in params], mass)[:, 0]
    for row in is_wide.nonzero()[:, 0].tolist():
        one = slice(row, row + 1)
        values, token_ids = scores[one].sort(descending=True, stable=True)
        drawn[row] = _draw_sorted(values.exp().double(), token_ids, mass[one], params[one], numbers[one])[0]
    return drawn


def _draw_sorted(
    weights: Tensor, token_ids: Tensor, mass: Tensor, params: list[SamplingParams], numbers: list[float]
) -> list[int]:
    """Apply top-p and min-p to weights [R, C], likeliest first, that are parts of mass [R]; then draw."""
    mass_before = weights.cumsum(-1) - weights
    outside = mass_before >= _column([p.top_p for p in params], weights) * mass[:, None]
    outside |= weights < _column([p.min_p for p in params], weights)  # the likeliest weighs 1
    outside[:, 0] = False
    columns = _invert(weights.masked_fill(outside, 0.0), numbers)
    return token_ids.gather(-1, columns[:, None])[:, 0].tolist()


def _invert(weights: Tensor, numbers: list[float]) -> Tensor:
    """Return the column in which each row's cumulative weight first passes its number's share of the total.

    Shapes: weights [R, C], numbers in [0, 1) -> [R] int64. Summed in float64: in float32 the error over a
    large vocabulary is as big as a rare token. A column of weight 0 is never returned.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    threshold = _column(numbers, cumulative) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


def _column(values: list[float], like: Tensor) -> Tensor:
    """Make one value a row into a column that broadcasts over [R, C]."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _logprobs(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Report tokens under the model's own distribution. Shapes: logits [R, V]; one token and count a row."""
    if not token_ids:
        return []
    scores = logits.log_softmax(dim=-1)
    chosen = scores.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (scores > chosen).sum(-1) + 1
    # always the same width, so that the order of equal tokens does not depend on what other rows ask for
    top = scores.topk(min(MAX_LOGPROBS, scores.shape[-1]))
    columns = (chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
    return [
        TokenLogprobs(token_id, logprob, rank, list(zip(ids[:count], values[:count], strict=True)))
        for token_id, count, logprob, rank, ids, values in zip(token_ids, num_top, *columns, strict=True)
    ]
