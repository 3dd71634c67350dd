"""How many of the experts that tokens need a predictor names, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HitRates:
    """Shares, of each layer with experts.

    `top1`: the likeliest expert is the one guessed first. `top3`: it is among the first three. `top_k`: of all experts
    that tokens use, those among as many guesses. `most_used`: the same if always the layer's most used are guessed.
    """

    top1: list[float]
    top3: list[float]
    top_k: list[float]
    most_used: list[float]

    def mean(self) -> dict[str, float]:
        """Return the mean over layers of each."""
        return {name: sum(of) / len(of) for name in self.__slots__ for of in [getattr(self, name)]}


def hit_rates(logits: Tensor, experts: Tensor, top_k: int, use_counts: Tensor) -> HitRates:
    """Compare guesses with what routers choose.

    Shapes: logits [N, layers, E], of the predictor; experts [N, layers, at least top_k] int64, the router's likeliest
    first; use_counts [layers, E], of text that nothing is measured on. N is at least 1.
    """
    num_guesses = min(max(3, top_k), logits.shape[-1])
    guesses = logits.topk(num_guesses, dim=-1).indices
    first, used = experts[..., :1], experts[..., :top_k]
    most_used = use_counts.topk(top_k, dim=-1).indices.expand(len(logits), -1, -1)
    return HitRates(
        top1=_share(first, guesses[..., :1]),
        top3=_share(first, guesses[..., :3]),
        top_k=_share(used, guesses[..., :top_k]),
        most_used=_share(used, most_used),
    )


def count_uses(experts: Tensor, num_experts: int, top_k: int) -> Tensor:
    """Return how many tokens use each expert. Shapes: experts [N, layers, at least top_k] -> [layers, E]."""
    used = experts[..., :top_k].transpose(0, 1).flatten(1)
    return torch.stack([torch.bincount(of_layer, minlength=num_experts) for of_layer in used])


def are_guessed(wanted: Tensor, guesses: Tensor) -> Tensor:
    """Return what of the wanted is guessed. Shapes: wanted [..., W], guesses [..., G] -> [..., W] bool."""
    return (wanted[..., :, None] == guesses[..., None, :]).any(-1)


def _share(wanted: Tensor, guesses: Tensor) -> list[float]:
    """Return which share of what is wanted is guessed, by layer. Shapes: [N, layers, any] each."""
    return are_guessed(wanted, guesses).float().mean(dim=(0, 2)).tolist()
