"""What a speculator is taught, and which places count.

Distillation (Hinton et al., 1503.02531): the target's distribution over its likeliest tokens, and some of the token
that it said. Boosting (SpecInfer, 2305.09781, section 3): a speculator of a pool learns above all
where those before it were wrong.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SAID_SHARE: Final = 0.2  # of the loss, for the token that was said
COVERED_WEIGHT: Final = 0.1  # of a place where a speculator before was right, beside 1 where all were wrong


def distillation_loss(logits: Tensor, likeliest: Tensor, logprobs: Tensor, said: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean over places, in nats, of the cross-entropy to the target's distribution and its token.

    What is outside of the likeliest tokens is left out of the distribution, which is scaled up to 1.

    Shapes: logits [R, V]; likeliest [R, K] int64, -1 where it is none of the V; logprobs [R, K]; said [R] int64, -1
    likewise; weights [R].
    """
    total = torch.logsumexp(logits.float(), dim=-1)
    chances = logprobs.exp() * (likeliest >= 0)
    chances = chances / chances.sum(-1, keepdim=True).clamp(min=1e-9)
    soft = (chances * (total[:, None] - logits.gather(1, likeliest.clamp(min=0)))).sum(-1)
    hard = (total - logits.gather(1, said.clamp(min=0)[:, None])[:, 0]) * (said >= 0)
    losses = (1 - SAID_SHARE) * soft + SAID_SHARE * hard
    return (losses * weights).sum() / weights.sum()


def boost_weights(covered: Tensor) -> Tensor:
    """Return what each place counts, 1 on average. Shapes: covered [R] bool, by any speculator before -> [R]."""
    weights = torch.where(covered, COVERED_WEIGHT, 1.0)
    return weights / weights.mean()
