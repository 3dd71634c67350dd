"""Log-probabilities under the model's own distribution: before temperature, penalties and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeflow.core.engine_messages import TokenLogprobs
from moeflow.core.sampling_params import MAX_LOGPROBS
from moeflow.kernels.arrays import Array, ids_on, on_host
from moeflow.kernels.on_demand import on_demand
from moeflow.kernels.sample import Floats, likeliest
from moeflow.kernels.triton import launching
from moeflow.models.pass_input import PROMPT_CHUNK

with on_demand(__name__):
    from moeflow.kernels import device_sample


def prompt_logprobs(logits: Array, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the log-probability of each prompt token given those before it.

    Shapes: logits [P, V] float32; row i is the prediction of token_ids[i], so both exclude the first token.
    """
    result: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), PROMPT_CHUNK):
        chunk = list(token_ids[start : start + PROMPT_CHUNK])
        result += logprobs_of(logits[start : start + PROMPT_CHUNK], chunk, [num_top] * len(chunk))
    return result


def logprobs_of(logits: Array, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probability of a token of each row, and those of as many of the likeliest as are asked for.

    Shapes: logits [R, V] float32, not changed; one token and count a row.
    """
    if launching.accepts(logits):
        computed = device_sample.logprobs(logits, ids_on(token_ids, logits.device), MAX_LOGPROBS)
        return of_device(device_sample.fetch([computed])[0], token_ids, num_top)
    # Row by row in float64, so that a row's numbers depend on nothing else.
    return [
        _of_row(row, token_id, count) for row, token_id, count in zip(on_host(logits), token_ids, num_top, strict=True)
    ]


def of_device(found: NDArray[Any], token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return what `device_sample.logprobs` has found for tokens."""
    middle = 1 + found.shape[1] // 2
    return [
        TokenLogprobs(token_id, _narrow(row[0]), int(row[1]), _pairs(row[2:middle], row[middle:], count))
        for row, token_id, count in zip(found, token_ids, num_top, strict=True)
    ]


def _of_row(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Shapes: logits [V]."""
    scores = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # logits that are not finite make no number here either
        scores -= scores.max()
        scores -= np.log(np.exp(scores).sum())
    chosen = scores[token_id]
    rank = int((scores > chosen).sum()) + 1
    # always as many, so that the order of equal tokens does not depend on how many are asked for
    top = likeliest(scores, MAX_LOGPROBS)
    return TokenLogprobs(token_id, _narrow(chosen), rank, _pairs(top, scores[top], num_top))


def _pairs(tokens: NDArray[Any], logprobs: NDArray[Any], count: int) -> list[tuple[int, float]]:
    return [(int(token), _narrow(value)) for token, value in zip(tokens[:count], logprobs[:count], strict=True)]


def _narrow(logprob: Any) -> float:
    """Return a number as float32 has it, which is as much as logits tell."""
    return float(np.float32(logprob))
