"""How many choices of a pass an expert takes, as mixtures of experts are trained (2101.03961, section 2.2)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from moeflow.kernels.arrays import Array, address, is_contiguous
from moeflow.kernels.cpu import row_ops
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


class ExpertCapacity:
    """The limit of all layers of a model, and counts of choices.

    An expert takes ceil(K * factor * T / E) choices of a pass, and at least one. Those of earlier tokens come first,
    and of one token the better ones. Later choices are dropped: they weigh 0.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._counts = np.zeros(2, np.int64)  # choices, and dropped ones
        self.handle = row_ops.bind_capacity(factor=factor, counts=address(self._counts))  # looks at the counts

    @property
    def num_choices(self) -> int:
        """Choices so far."""
        return int(self._counts[0])

    @property
    def num_dropped(self) -> int:
        """Dropped choices so far."""
        return int(self._counts[1])

    def limit(self, topk_ids: Array, topk_weights: Array, num_experts: int) -> Array:
        """Return the weights after drops; those given may change.

        Shapes: topk_ids and topk_weights [T, K] of all tokens of a pass -> [T, K].
        """
        if row_ops.accepts(topk_weights) and is_contiguous(topk_ids):
            row_ops.limit_choices(self.handle, topk_ids, topk_weights, num_experts)
            return topk_weights
        most = max(math.ceil(self.factor * topk_ids.numel() / num_experts), 1)
        is_dropped = _places(topk_ids) >= most
        self._counts += (is_dropped.numel(), int(is_dropped.sum()))
        return topk_weights.masked_fill(is_dropped, 0)


def _places(topk_ids: Tensor) -> Tensor:
    """Return for each choice how many earlier ones name the same expert. Shapes: [T, K] -> [T, K]."""
    chosen, order = topk_ids.flatten().sort(stable=True)
    places = torch.empty_like(chosen)
    places[order] = torch.arange(len(chosen), device=chosen.device) - torch.searchsorted(chosen, chosen)
    return places.view_as(topk_ids)
