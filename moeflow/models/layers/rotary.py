"""Rotary embeddings of one model: turn each `RopeConfig` into cos and sin, once per pass for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moeflow.core.attention_config import RopeConfig
from moeflow.kernels.arrays import Array, array_on
from moeflow.kernels.rotary import (
    Frequencies,
    Rotary,
    RotaryTable,
    inverse_frequencies,
    rotary_table,
    stretch_llama3,
    stretch_yarn,
    yarn_attention_factor,
)

if TYPE_CHECKING:
    from moeflow.kernels.arrays import Device, DType


class RotaryEmbeddings:
    """Computes the tables of a pass, one for each kind of rotary positions that layers have; holds no weights."""

    def __init__(self, ropes: Sequence[RopeConfig], head_dim: int, device: Device) -> None:
        self.kinds = [Rotary(array_on(_frequencies(rope, head_dim), device), _scale(rope)) for rope in ropes]

    def __call__(self, positions: Array, dtype: DType) -> tuple[RotaryTable, ...]:
        """Shapes: positions [T] int64."""
        return tuple(RotaryTable(*rotary_table(positions, *kind, dtype)) for kind in self.kinds)


def _frequencies(rope: RopeConfig, head_dim: int) -> Frequencies:
    frequencies = inverse_frequencies(rope.rotary_dim or head_dim, rope.theta)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return stretch_llama3(
            frequencies,
            factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_position=rope.original_max_position,
        )
    if rope.kind == "yarn":
        return stretch_yarn(
            frequencies,
            theta=rope.theta,
            factor=rope.factor,
            beta_fast=rope.beta_fast,
            beta_slow=rope.beta_slow,
            original_max_position=rope.original_max_position,
            truncate=rope.truncate,
        )
    if rope.kind == "longrope":
        return (frequencies / np.array(rope.pair_factors, np.float32)).astype(np.float32)
    if rope.kind == "proportional":
        frequencies[rope.turning_dim // 2 :] = 0.0
        return (frequencies / np.float32(rope.factor)).astype(np.float32)
    assert rope.kind == "default", rope.kind  # the reader of the config refused the others
    return frequencies


def _scale(rope: RopeConfig) -> float:
    if rope.kind == "longrope" and rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind != "yarn":
        return 1.0
    return yarn_attention_factor(rope.factor) if rope.attention_factor is None else rope.attention_factor
