"""What some families do to all numbers of embeddings and logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeflow.kernels.arrays import Array, is_numpy
from moeflow.kernels.on_demand import torch


def scaled(x: Array, factor: float) -> Array:
    """Return x times a factor; itself if that is 1."""
    return x if factor == 1.0 else x * factor


def soft_cap(logits: Array, cap: float) -> Array:
    """Return `cap * tanh(logits / cap)`."""
    part = logits / cap
    bounded: Any = np.tanh(part) if is_numpy(part) else torch.tanh(part)
    return scaled(bounded, cap)
