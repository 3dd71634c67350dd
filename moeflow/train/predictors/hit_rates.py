"""The share of the needed experts that a predictor names, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HitRates:
    """Shares for each layer with experts.

    `top1`: the likeliest expert is predicted first. `top3`: it is among the first three. `top_k`: the used experts
    among as many predictions. `most_used`: the same for a constant prediction of the layer's most used experts.
    """

    top1: list[float]
    top3: list[float]
    top_k: list[float]
    most_used: list[float]

    def mean(self) -> dict[str, float]:
        """Return the mean over layers of each."""
        return {name: sum(of) / len(of) for name in self.__slots__ for of in [getattr(self, name)]}


def hit_rates(logits: Tensor, experts: Tensor, top_k: int, use_counts: Tensor) -> HitRates:
    """Compare predictions with the routers' choices.

    Shapes: logits [N, layers, E], of the predictor; experts [N, layers, at least top_k] int64, the router's likeliest
    first; use_counts [layers, E], of other text. N is at least 1.
    """
    num_predicted = min(max(3, top_k), logits.shape[-1])
    predicted = logits.topk(num_predicted, dim=-1).indices
    first, used = experts[..., :1], experts[..., :top_k]
    most_used = use_counts.topk(top_k, dim=-1).indices.expand(len(logits), -1, -1)
    return HitRates(
        top1=_share(first, predicted[..., :1]),
        top3=_share(first, predicted[..., :3]),
        top_k=_share(used, predicted[..., :top_k]),
        most_used=_share(used, most_used),
    )


def count_uses(experts: Tensor, num_experts: int, top_k: int) -> Tensor:
    """Return how many tokens use each expert. Shapes: experts [N, layers, at least top_k] -> [layers, E]."""
    used = experts[..., :top_k].transpose(0, 1).flatten(1)
    return torch.stack([torch.bincount(of_layer, minlength=num_experts) for of_layer in used])


def are_drafted(wanted: Tensor, predicted: Tensor) -> Tensor:
    """Return which of the wanted are predicted. Shapes: wanted [..., W], predicted [..., G] -> [..., W] bool."""
    return (wanted[..., :, None] == predicted[..., None, :]).any(-1)


def _share(wanted: Tensor, predicted: Tensor) -> list[float]:
    """Return the predicted share of the wanted, by layer. Shapes: [N, layers, any] each."""
    return are_drafted(wanted, predicted).float().mean(dim=(0, 2)).tolist()
