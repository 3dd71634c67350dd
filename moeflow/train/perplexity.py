"""Perplexity: how surprised a model is by text, exp of the mean negative log-likelihood of a token.

Text longer than a window is cut into windows that see nothing of each other, so figures compare only at
the same window; the first token of a window is given, not predicted.
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
_LOGITS_ROWS = 128  # computed at once: 25 MB at a vocabulary of 49,152


def perplexity(
    model: CausalLM,
    texts: Iterable[Sequence[int]],
    *,
    window: int = WINDOW,
    on_tokens: Callable[[int], None] | None = None,
) -> float:
    """Return the perplexity over all tokens of `texts` (token ids) together.

    on_tokens(num_tokens) is called after each window.

    Raises: ConfigError if there is no token to predict.
    """
    total, count = 0.0, 0
    for text in texts:
        for token_ids in windows(text, window):
            total += _negative_log_likelihood(model, token_ids)
            count += len(token_ids) - 1
            if on_tokens is not None:
                on_tokens(len(token_ids))
    if count == 0:
        raise ConfigError("perplexity needs a text of at least 2 tokens; give more text")
    return math.exp(total / count)


def windows(token_ids: Sequence[int], window: int) -> Iterator[Sequence[int]]:
    """Cut a text into windows, in order; a last one of a single token, which predicts nothing, is left out."""
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
