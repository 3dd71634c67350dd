"""Low-rank changes that turn copies of a dense feed-forward network into different experts.

Every matrix of every expert has two factors: a dense weight W [out, in] becomes W + (A B)^T. All experts share the
dense weights, so a stack of factors is a complete description of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from moeflow.core.model_config import ModelConfig
from moeflow.train.upcycled_checkpoint import ExpertMatrix

GATE, UP, DOWN = MATRICES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Adapters:
    """The factors of all experts by name: A [E, in, r] and B [E, r, out], float32."""

    factors: Mapping[str, Tensor]

    @classmethod
    def untrained(cls, shape: ModelConfig, rank: int, seed: int) -> Self:
        """Return those of one expert that equals the dense network."""
        generator = torch.Generator().manual_seed(seed)
        hidden, inner = shape.hidden_size, shape.feed_forward.intermediate_size
        factors: dict[str, Tensor] = {}
        for layer in range(shape.num_layers):
            for matrix in MATRICES:
                num_in, num_out = (inner, hidden) if matrix == DOWN else (hidden, inner)
                a, b = factor_names(layer, matrix)
                factors[a] = torch.randn(1, num_in, rank, generator=generator) / math.sqrt(num_in)
                factors[b] = torch.zeros(1, rank, num_out)
        return cls(factors)

    @classmethod
    def stacked(cls, experts: Sequence[Self]) -> Self:
        """Return all experts as one stack."""
        return cls({name: torch.cat([each.factors[name] for each in experts]) for name in experts[0].factors})

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return len(next(iter(self.factors.values())))

    def of(self, layer: int, matrix: str) -> tuple[Tensor, Tensor]:
        """Return A and B of one matrix."""
        a, b = factor_names(layer, matrix)
        return self.factors[a], self.factors[b]

    def changed(self, weight: np.ndarray, place: ExpertMatrix) -> Tensor:
        """Return an expert's matrix in bf16. Shapes: weight [out, in], the dense one, float32."""
        a, b = self.of(place.layer, place.name)
        changed = torch.addmm(torch.from_numpy(weight), b[place.expert].T, a[place.expert].T)
        return changed.to(torch.bfloat16)


def factor_bytes(shape: ModelConfig, rank: int) -> int:
    """Return the bytes of one expert's factors."""
    values = rank * (shape.hidden_size + shape.feed_forward.intermediate_size)
    return shape.num_layers * len(MATRICES) * values * torch.float32.itemsize


def factor_names(layer: int, matrix: str) -> tuple[str, str]:
    """Return the names of A and B."""
    return f"layers.{layer}.{matrix}.a", f"layers.{layer}.{matrix}.b"
