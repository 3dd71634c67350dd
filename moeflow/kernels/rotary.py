"""Rotary position embedding: frequencies, their stretchings for long contexts, and the rotation itself.

Halves are rotated against each other (dimension i with i + D/2), as Hugging Face checkpoints expect.
Sources: RoFormer (2104.09864); llama3 and yarn (2309.00071) as published with those models.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import Array, array_on, dtype_name, is_in_main_memory, is_numpy, on_host
from moeflow.kernels.cpu import rotary as cpu_rotary
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.arrays import DType

with on_demand(__name__):
    from moeflow.kernels.triton import rotary_table as triton_rotary_table

Frequencies: TypeAlias = NDArray[np.floating[Any]]  # float32


class Rotary(NamedTuple):
    """One kind of rotary positions."""

    frequencies: Array  # [R/2] float32: the angle per position of each rotated pair, in radians
    scale: float = 1.0  # of cos and sin


class RotaryTable(msgspec.Struct, frozen=True):
    """cos and sin of the tokens of one pass, each [T, 1, R] with R dimensions of a head that are rotated."""

    cos: Array
    sin: Array

    @property
    def dim(self) -> int:
        """R."""
        return int(self.cos.shape[-1])


def inverse_frequencies(head_dim: int, theta: float) -> Frequencies:
    """Return the angle per position of each rotated pair: [D/2], in radians."""
    return (1.0 / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))).astype(
        np.float32
    )


def stretch_llama3(
    frequencies: Frequencies,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: int,
) -> Frequencies:
    """Slow the slow frequencies down by `factor`, keep the fast ones, blend in between."""
    turns = original_max_position * frequencies / (2 * math.pi)  # over the original context
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clip(0, 1)
    return (1 - keep) * frequencies / factor + keep * frequencies


def stretch_yarn(
    frequencies: Frequencies,
    *,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_position: int,
    truncate: bool = True,
) -> Frequencies:
    """Blend from kept to slowed frequencies along the dimensions, between beta_fast and beta_slow turns.

    Both ends are taken outwards to whole dimensions if `truncate`.
    """
    num_pairs = len(frequencies)

    def pair_that_turns(num_turns: float) -> float:
        return num_pairs * math.log(original_max_position / (num_turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = max(high - low, 0.001)  # no division by zero when both fall on one pair
    slowed = ((np.arange(num_pairs, dtype=np.float32) - low) / width).clip(0, 1)
    stretched: Frequencies = slowed * frequencies / factor + (1 - slowed) * frequencies
    return stretched


def yarn_attention_factor(factor: float) -> float:
    """Return yarn's default scale of cos and sin."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_table(positions: Array, frequencies: Array, scale: float, dtype: DType) -> tuple[Array, Array]:
    """Return cos and sin for each token, ready for `apply_rotary`, of angles in float32.

    The first half of sin is negated, so that the rotation is one roll, one product and one multiply-add.

    Shapes: positions [T] int64, frequencies [D/2] float32 where positions are -> cos, sin [T, 1, D] of `dtype`.
    """
    if is_in_main_memory(positions):
        if cpu_rotary.accepts(positions, frequencies):
            cos, sin = cpu_rotary.rotary_table(positions, frequencies, scale)
        else:
            table = _table(on_host(positions), on_host(frequencies), scale)
            cos, sin = (array_on(it, None if is_numpy(positions) else positions.device) for it in table)
        return (cos, sin) if dtype_name(dtype) == "float32" else (cos.to(dtype), sin.to(dtype))
    if launching.accepts(positions):
        return triton_rotary_table.rotary_table(positions, frequencies, scale, dtype)
    angles = torch.outer(positions.float(), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    cos = torch.cat((cos, cos), dim=-1)
    sin = torch.cat((-sin, sin), dim=-1)
    return cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)


def _table(positions: NDArray[np.int64], frequencies: Frequencies, scale: float) -> tuple[Frequencies, Frequencies]:
    """Do so in NumPy, in float64: angles are rounded as models learnt them, no more.

    Shapes: [T], [D/2] -> [T, 1, D] each.
    """
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    half = frequencies.shape[0]
    cos, sin = (np.empty((len(positions), 1, 2 * half), np.float32) for _ in range(2))
    cos[:, 0, :half] = cos[:, 0, half:] = np.cos(angles) * scale
    sin[:, 0, half:] = np.sin(angles) * scale
    np.negative(sin[:, 0, half:], out=sin[:, 0, :half])
    return cos, sin


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of each token by its position, its first R dimensions.

    Shapes: x [T, heads, D], cos and sin [T, 1, R] from `rotary_table` -> [T, heads, D], contiguous.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat([apply_rotary(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
