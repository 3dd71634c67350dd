"""Rotary position embedding: frequencies, their stretchings for long contexts, and the rotation itself.

Halves are rotated against each other (dimension i with i + D/2), as Hugging Face checkpoints expect.
Sources: RoFormer (2104.09864); llama3 and yarn (2309.00071) as published with those models.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return the angle per position of each rotated pair: [D/2] float32, in radians."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)


def stretch_llama3(
    frequencies: Tensor, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_position: int
) -> Tensor:
    """Slow the slow frequencies down by `factor`, keep the fast ones, blend in between."""
    turns = original_max_position * frequencies / (2 * math.pi)  # over the original context
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - keep) * frequencies / factor + keep * frequencies


def stretch_yarn(
    frequencies: Tensor, *, theta: float, factor: float, beta_fast: float, beta_slow: float, original_max_position: int
) -> Tensor:
    """Blend from kept to slowed frequencies along the dimensions, between beta_fast and beta_slow turns."""
    num_pairs = frequencies.shape[0]

    def pair_that_turns(num_turns: float) -> float:
        return num_pairs * math.log(original_max_position / (num_turns * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), 2 * num_pairs - 1)
    width = max(high - low, 0.001)  # no division by zero when both fall on one pair
    slowed = ((torch.arange(num_pairs, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return slowed * frequencies / factor + (1 - slowed) * frequencies


def yarn_attention_factor(factor: float) -> float:
    """Return yarn's default scale of cos and sin."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_table(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin for each token, ready for `apply_rotary`, computed in float32.

    The first half of sin is negated, so that the rotation is one roll, one product and one multiply-add.

    Shapes: positions [T] int64, frequencies [D/2] float32 -> cos, sin [T, 1, D] of `dtype`.
    """
    angles = torch.outer(positions.float(), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    cos = torch.cat((cos, cos), dim=-1)
    sin = torch.cat((-sin, sin), dim=-1)
    return cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of each token by its position.

    Shapes: x [T, heads, D], cos and sin [T, 1, D] from `rotary_table` -> [T, heads, D], contiguous.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
