"""What is measured: a layer's shape, and tokens whose experts are as skewed as asked for.

Everything follows from the numbers here, so each process makes its own part, and no process sends it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeflow.kernels.activation import Nonlinearity
from moeflow.parallel.placement.placement import ExpertIds, Loads
from studies.parallel.skew_router import SkewRouter


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """A layer and the ranks that share it."""

    num_ranks: int
    num_experts: int
    top_k: int
    hidden: int
    width: int  # of an expert
    is_gated: bool  # three matrices, else two
    weights: Literal["float32", "bfloat16"]

    @property
    def function(self) -> Nonlinearity:
        """Of the hidden units: that of models with such experts."""
        return "silu" if self.is_gated else "relu"

    @property
    def num_matrices(self) -> int:
        """Of an expert."""
        return 3 if self.is_gated else 2


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """Rows of a batch and what their router chose."""

    x: Tensor  # [T, H] float32
    topk_ids: Tensor  # [T, K] int64
    topk_weights: Tensor  # [T, K] float32


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A pass through the layer; each rank brings tokens of its own."""

    layer: LayerShape
    num_tokens: tuple[int, ...]  # of each rank
    router_skew: float  # share of the tokens that go to hot experts
    num_experts_skew: int  # hot experts
    capacity_factor: float  # of the layout that drops tokens
    seed: int

    @property
    def router(self) -> SkewRouter:
        """What chooses experts. Raises: ConfigError if that makes no sense."""
        return SkewRouter(
            num_experts=self.layer.num_experts,
            top_k=self.layer.top_k,
            router_skew=self.router_skew,
            num_experts_skew=self.num_experts_skew,
            seed=self.seed,
        )

    def topk_ids(self) -> NDArray[np.int64]:
        """Return the experts of all ranks' tokens, [T, K]; rank 0 has the first."""
        return self.router.route(sum(self.num_tokens))

    def loads_before(self) -> Loads:
        """Return the tokens that each expert had in a batch before, [E]: of the same router, by other chances."""
        before: ExpertIds = dataclasses.replace(self.router, seed=self.seed + 1).route(sum(self.num_tokens))
        return np.bincount(before.ravel(), minlength=self.layer.num_experts).astype(float)

    def tokens(self, rank: int) -> Tokens:
        """Return what a rank brings."""
        start = sum(self.num_tokens[:rank])
        stop = start + self.num_tokens[rank]
        random = torch.Generator().manual_seed(self.seed * len(self.num_tokens) + rank)
        x = torch.randn(stop - start, self.layer.hidden, generator=random)
        topk_weights = torch.rand(stop - start, self.layer.top_k, generator=random) + 0.1
        topk_ids = torch.from_numpy(self.topk_ids()[start:stop])
        return Tokens(x, topk_ids, topk_weights / topk_weights.sum(dim=1, keepdim=True))
