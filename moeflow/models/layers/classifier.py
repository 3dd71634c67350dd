"""Sorts texts into classes: a linear layer over the vector of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.weight_allocator import WeightAllocator, whole


class Classifier:
    """The weights of a few classes, which are not packed."""

    def __init__(self, allocator: WeightAllocator, hidden_size: int, num_classes: int) -> None:
        self.weight = allocator.empty(num_classes, hidden_size)
        self.bias = allocator.empty(num_classes)

    @torch.inference_mode()
    def __call__(self, vector: Sequence[float]) -> list[float]:
        """Return the probability of each class for the vector [H] of a text, computed in float64."""
        values = torch.tensor(vector, dtype=torch.float64)
        scores = (self.weight.cpu().double() * values).sum(1) + self.bias.cpu().double()
        probabilities: list[float] = scores.softmax(0).tolist()
        return probabilities

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield f"{prefix}.weight", whole(self.weight)
        yield f"{prefix}.bias", whole(self.bias)
