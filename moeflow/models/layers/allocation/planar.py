"""Weights on a GPU with the layers' matrices in integers, as the Triton kernels read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.triton.planar_rows import empty_planar
from moeflow.kernels.triton.planar_weights import MadeFormat
from moeflow.kernels.weight_format import BITS_PER_VALUE
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.expert_weights import ExpertTensors
from moeflow.models.layers.weight_allocator import ExpertShape, HeadWeight, StackedWeight


@dataclass(frozen=True, slots=True)
class PlanarAllocator(TensorAllocator):
    """Matrices of layers in one format of integers; embeddings, routers and all else in tensors."""

    weight_format: MadeFormat = "int8"

    @property
    def bits_per_value(self) -> float:
        """See `WeightAllocator`."""
        return BITS_PER_VALUE[self.weight_format]

    def head(self, rows: int, cols: int, own: Sequence[range] | None = None) -> HeadWeight:
        """See `WeightAllocator.head`. Four bits are too few for it."""
        return empty_planar("int8", (1, rows, cols), self.device)

    def stacked(self, parts: Mapping[str, int], cols: int, own: Mapping[str, range] | None = None) -> StackedWeight:
        """See `WeightAllocator.stacked`."""
        return empty_planar(self.weight_format, (1, sum(parts.values()), cols), self.device)

    def experts(self, shape: ExpertShape, biases: ExpertBiases | None = None) -> ExpertTensors:
        """See `WeightAllocator.experts`."""
        count, hidden, width = shape.num_experts, shape.hidden_size, shape.intermediate_size
        ups = empty_planar(self.weight_format, (count, shape.kind.num_ups * width, hidden), self.device)
        downs = empty_planar(self.weight_format, (count, hidden, width), self.device)
        return ExpertTensors(ups, downs, shape.kind, biases)
