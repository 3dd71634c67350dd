"""Perplexity: exp of the mean negative log-likelihood of a token.

Long text is cut into independent windows, so figures compare only for the same window. The first token of a window is
not predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.nn import functional as F

from moeflow.core.errors import ConfigError
from moeflow.models.layers.decoder import CausalLM
from moeflow.train.bare_model import run_sequence

WINDOW = 512  # tokens
_LOGITS_ROWS = 128  # of one computation: 25 MB for a vocabulary of 49,152


def perplexity(
    model: CausalLM,
    texts: Iterable[Sequence[int]],
    *,
    window: int = WINDOW,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> float:
    """Return the perplexity over all tokens of `texts` (token ids). on_tokens(num_tokens) is called for each window.

    Raises: ConfigError if there is no token to predict.
    """
    total, count = 0.0, 0
    for text in texts:
        for token_ids in windows(text, window):
            total += _negative_log_likelihood(model, token_ids)
            count += len(token_ids) - 1
            on_tokens(len(token_ids))
    if count == 0:
        raise ConfigError("perplexity needs a text of at least 2 tokens; add text")
    return math.exp(total / count)


def windows(token_ids: Sequence[int], window: int) -> Iterator[Sequence[int]]:
    """Cut a text into windows, in order, without a last one of a single token."""
    for start in range(0, len(token_ids) - 1, window):
        yield token_ids[start : start + window]


@torch.inference_mode()
def _negative_log_likelihood(model: CausalLM, token_ids: Sequence[int]) -> float:
    """Return the sum over all tokens but the first, in nats."""
    hidden_states = run_sequence(model, token_ids)[:-1]
    targets = torch.tensor(token_ids[1:], device=hidden_states.device)
    total = 0.0
    for start in range(0, len(targets), _LOGITS_ROWS):
        rows = slice(start, start + _LOGITS_ROWS)
        total += F.cross_entropy(model.logits(hidden_states[rows]), targets[rows], reduction="sum").item()
    return total
