"""The loss of a speculator, and the weight of each place in it.

Distillation (Hinton et al., 1503.02531): the target's distribution over its likeliest tokens, and a share for the token
it sampled. Boosting (SpecInfer, 2305.09781, section 3): each speculator of a pool learns mostly from the errors of the
ones before it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SAID_SHARE: Final = 0.2  # of the loss, for the sampled token
COVERED_WEIGHT: Final = 0.1  # of a place that an earlier speculator predicts; others have 1


def distillation_loss(logits: Tensor, likeliest: Tensor, logprobs: Tensor, said: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean over places, in nats, of the cross-entropy to the target's distribution and its token.

    The distribution is that of the likeliest tokens, scaled to 1.

    Shapes: logits [R, V]; likeliest [R, K] int64, -1 for a token outside of the V; logprobs [R, K]; said [R] int64, -1
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
    """Return the weight of each place, 1 on average. Shapes: covered [R] bool, by any earlier speculator -> [R]."""
    weights = torch.where(covered, COVERED_WEIGHT, 1.0)
    return weights / weights.mean()
