"""Weights packed in the CPU kernels' order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

import numpy as np

from moeflow.checkpoint.packed.weight_memory import FreshMemory, WeightMemory
from moeflow.kernels.arrays import FLOAT32, Array, array_on, is_numpy
from moeflow.kernels.cpu.latent_weights import PackedUpProjection, UpProjectionShape
from moeflow.kernels.cpu.packed_weight import PackedStack, PackedWeight, matrix_bytes
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.on_demand import torch
from moeflow.kernels.weight_format import BITS_PER_VALUE, LayerFormats, WeightFormat
from moeflow.models.layers.allocation.expert_homes import ExpertHome, InCache, InMemory, PackedSpec, SlicedOnRanks
from moeflow.models.layers.allocation.weight_formats import MatrixRole, WeightFormats
from moeflow.models.layers.expert_weights import ExpertWeights
from moeflow.models.layers.weight_allocator import ExpertShape, StackedWeight, WeightAllocator, shapes_only
from moeflow.parallel.blocks import shifted


@dataclass(frozen=True, slots=True)
class PackedAllocator(WeightAllocator):
    """Matrices packed in `memory`, with vectors as arrays beside them."""

    formats: WeightFormats
    memory: WeightMemory = field(default_factory=FreshMemory)
    home: ExpertHome = field(default_factory=InMemory)
    layer: LayerFormats | None = None  # of the current layer; None: all layers have the same

    @property
    def bits_per_value(self) -> float:
        """See `WeightAllocator`."""
        return BITS_PER_VALUE[self.formats.matrices]

    @property
    def is_filled(self) -> bool:
        """See `WeightAllocator`."""
        return self.memory.is_filled

    @property
    def has_networks(self) -> bool:
        """See `WeightAllocator`."""
        return True

    @property
    def has_cached_experts(self) -> bool:
        """See `WeightAllocator`."""
        return isinstance(self.home, InCache)

    def elsewhere(self) -> WeightAllocator:
        """See `WeightAllocator.elsewhere`. Filled memory has all layers, so this skips them there."""
        return replace(self, home=InMemory(), tensor_group=None) if self.is_filled else shapes_only()

    def in_layer(self, layer_idx: int) -> WeightAllocator:
        """See `WeightAllocator.in_layer`."""
        return replace(self, layer=self.formats.layers[layer_idx]) if self.formats.layers else self

    def empty(self, *shape: int) -> Array:
        """See `WeightAllocator.empty`."""
        weight = self.memory.block(math.prod(shape) * self.dtype.itemsize).view(self.dtype).reshape(shape)
        return weight if is_numpy(weight) else torch.nn.Parameter(weight, requires_grad=False)

    def ones(self, size: int) -> Array:
        """See `WeightAllocator.ones`."""
        return array_on(np.ones(size, FLOAT32), self.device)

    def stacked(self, parts: Mapping[str, int], cols: int, own: Mapping[str, range] | None = None) -> StackedWeight:
        """See `WeightAllocator.stacked`. Neighbours in one format are one matrix."""
        weights: list[PackedWeight] = []
        for weight_format, names in groupby(parts, lambda name: self.formats.of_projection(name, self.layer)):
            sizes = {name: parts[name] for name in names}
            starts = accumulate(sizes.values(), initial=0)
            rows = (
                None if own is None else [shifted(own[name], start) for name, start in zip(sizes, starts, strict=False)]
            )
            weights.append(self._matrix(sum(sizes.values()), cols, weight_format, rows))
        return PackedStack(weights) if len(weights) > 1 else weights[0]

    def matrix(self, role: MatrixRole, rows: int, cols: int, own: Sequence[range] | None = None) -> PackedWeight:
        """See `WeightAllocator.matrix`."""
        return self._matrix(rows, cols, self.formats.of_matrix(role), own)

    def up_projection(self, dims: UpProjectionShape) -> PackedUpProjection:
        """See `WeightAllocator.up_projection`."""
        formats = self.formats
        return PackedUpProjection(dims, formats.up_projections, self.memory.block, is_wide=formats.is_wide)

    def router(self, num_experts: int, hidden_size: int, *, is_float32: bool = False) -> PackedWeight:
        """See `WeightAllocator.router`."""
        return self._matrix(num_experts, hidden_size, self.formats.routers)

    def experts(self, shape: ExpertShape, biases: ExpertBiases | None = None) -> ExpertWeights:
        """See `WeightAllocator.experts`."""
        formats = self.formats.of_experts(self.layer)
        return self.home.place(PackedSpec(shape, formats, self.formats.is_wide, self.memory, biases))

    def network(self, shape: ExpertShape, biases: ExpertBiases | None = None) -> ExpertWeights:
        """See `WeightAllocator.network`."""
        return self._network(shape, self.formats.of_experts(self.layer), biases)

    def shared_network(self, shape: ExpertShape) -> ExpertWeights:
        """See `WeightAllocator.shared_network`."""
        return self._network(shape, self.formats.of_shared(self.layer))

    def _network(
        self, shape: ExpertShape, formats: tuple[WeightFormat, WeightFormat], biases: ExpertBiases | None = None
    ) -> ExpertWeights:
        home = InMemory() if self.tensor_group is None else SlicedOnRanks(self.tensor_group)
        return home.place(PackedSpec(shape, formats, self.formats.is_wide, self.memory, biases, is_network=True))

    def _matrix(
        self, rows: int, cols: int, weight_format: WeightFormat, own: Sequence[range] | None = None
    ) -> PackedWeight:
        has_whole = own is None or self.memory.is_filled
        num_rows = rows if own is None or has_whole else sum(len(block) for block in own)
        storage = self.memory.block(matrix_bytes(weight_format, num_rows, cols))
        matrix = PackedWeight(storage, weight_format, num_rows, cols, is_wide=self.formats.is_wide)
        return matrix if own is None or not has_whole else matrix.take(own)
