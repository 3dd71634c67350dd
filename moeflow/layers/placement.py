"""Where a model's weights are allocated, and in which type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Placement:
    """Handed to each layer at construction. On the device "meta" nothing is allocated: shapes only."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> nn.Parameter:
        """Return an uninitialised weight; the loader fills it."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)
