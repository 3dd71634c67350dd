"""The loss of a predictor against the distribution of the model's routers.

Source: truncated knowledge distillation, SiDA (2310.18859, section 3.3): the teacher's likeliest experts alone, with a
small cross entropy on the likeliest. Published, both distributions cover these experts alone. The cross entropy is then
all that keeps other experts from the first ranks. The other loss has all experts in the predictor's distribution.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor
from torch.nn import functional as F

CROSS_ENTROPY_WEIGHT: Final = 0.005


def routing_loss(logits: Tensor, experts: Tensor, teacher_logits: Tensor, *, is_truncated: bool = False) -> Tensor:
    """Return the mean over tokens and layers, in nats.

    Shapes: logits [..., E], of the predictor; experts [..., T] int64, the teacher's, the likeliest first;
    teacher_logits [..., T], of these -> [].
    """
    if is_truncated:
        predicted = F.log_softmax(logits.gather(-1, experts), dim=-1)
    else:
        predicted = F.log_softmax(logits, dim=-1).gather(-1, experts)
    wanted = F.log_softmax(teacher_logits.float(), dim=-1)
    divergence = (wanted.exp() * (wanted - predicted)).sum(-1).mean()
    return divergence + CROSS_ENTROPY_WEIGHT * F.cross_entropy(logits.flatten(0, -2), experts[..., 0].flatten())
