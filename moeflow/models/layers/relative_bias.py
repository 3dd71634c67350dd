"""What the heads of a stack of layers add to their scores by distance: one table for all its layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moeflow.core.attention_config import RelativePositions
from moeflow.kernels.relative_positions import bucket_of
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.weight_allocator import WeightAllocator


class RelativeBias:
    """A learned number for each bucket of distances and each head."""

    def __init__(
        self, allocator: WeightAllocator, positions: RelativePositions, num_heads: int, *, is_bidirectional: bool
    ) -> None:
        self.weight = allocator.empty(positions.num_buckets, num_heads)
        self._positions = positions
        self._is_bidirectional = is_bidirectional
        self._by_distance: Tensor | None = None  # made of the weight once that is filled

    def by_distance(self) -> Tensor:
        """Return the bias by the key's position minus the query's, from -max_distance to max_distance.

        Shapes: -> [heads, 2 * max_distance + 1] float32.
        """
        if self._by_distance is None:
            reach = self._positions.max_distance
            buckets = bucket_of(
                torch.arange(-reach, reach + 1),
                num_buckets=self._positions.num_buckets,
                max_distance=reach,
                is_bidirectional=self._is_bidirectional,
            )
            self._by_distance = self.weight.float()[buckets.to(self.weight.device)].T.contiguous()
        return self._by_distance

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield f"{prefix}.relative_attention_bias.weight", self.weight
