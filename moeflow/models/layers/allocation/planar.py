"""Weights on a GPU as the Triton kernels read them: planar matrices in formats of files, or in integers made here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING

from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.triton.planar_rows import empty_planar
from moeflow.kernels.triton.planar_stack import PlanarStack
from moeflow.kernels.triton.planar_weights import PlanarWeights
from moeflow.kernels.weight_format import PLANAR_BITS, LayerFormats, WeightFormat, cut_unit
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.expert_weights import ExpertTensors
from moeflow.models.layers.weight_allocator import ExpertShape, HeadWeight, StackedWeight, WeightAllocator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlanarAllocator(TensorAllocator):
    """Matrices of layers and the output projection in planar formats, where `formats` has one; all else in tensors."""

    formats: WeightFormats = field(kw_only=True)
    layer: LayerFormats | None = None  # of the current layer; None: all layers have the same

    @property
    def bits_per_value(self) -> float:
        """See `WeightAllocator`."""
        return PLANAR_BITS.get(self.formats.matrices, self.dtype.itemsize * 8)

    @property
    def rearranges(self) -> bool:
        """See `WeightAllocator`. Experts on both processors, and what ranks share, lie as in the checkpoint."""
        return self.is_on_gpu and self.home is None and self.expert_devices is None and self.tensor_group is None

    @property
    def unit(self) -> int:
        """See `TensorAllocator`."""
        _, down = self.formats.of_experts(self.layer)
        return cut_unit(down)

    @property
    def joins_shared(self) -> bool:
        """See `WeightAllocator`."""
        if self.home is not None:
            return self.home.layers.num_joined > 0
        return self.rearranges and self.formats.joins_shared(self.layer)

    def has_one_format(self, names: Iterable[str]) -> bool:
        """See `WeightAllocator`."""
        return len(set(map(self._planar_format, names))) == 1

    def in_layer(self, layer_idx: int) -> WeightAllocator:
        """See `WeightAllocator.in_layer`."""
        return replace(self, layer=self.formats.layers[layer_idx]) if self.formats.layers else self

    def for_shared(self) -> WeightAllocator:
        """See `WeightAllocator.for_shared`."""
        if self.layer is None:
            return self
        up, down = self.formats.of_shared(self.layer)
        return replace(self, layer=replace(self.layer, up=up, down=down))

    def head(self, rows: int, cols: int, own: Sequence[range] | None = None) -> HeadWeight:
        """See `WeightAllocator.head`."""
        found = self.formats.of_matrix("head")
        num_rows = rows if own is None else sum(map(len, own))
        return self._matrix(found if found in PLANAR_BITS else None, num_rows, cols)

    def stacked(self, parts: Mapping[str, int], cols: int, own: Mapping[str, range] | None = None) -> StackedWeight:
        """See `WeightAllocator.stacked`. Neighbours in one format are one matrix."""
        sizes = parts if own is None else {name: len(rows) for name, rows in own.items()}
        weights = [
            self._matrix(weight_format, sum(sizes[name] for name in names), cols)
            for weight_format, names in groupby(parts, self._planar_format)
        ]
        return PlanarStack(weights) if len(weights) > 1 else weights[0]

    def _in_arrays(self, shape: ExpertShape, biases: ExpertBiases | None = None) -> ExpertTensors:
        count, hidden, width = shape.num_experts, shape.hidden_size, shape.intermediate_size
        up, down = self.formats.of_experts(self.layer)
        ups = self._matrices(up, count, shape.kind.num_ups * width, hidden)
        return ExpertTensors(ups, self._matrices(down, count, hidden, width), shape.kind, biases)

    def _planar_format(self, name: str) -> WeightFormat | None:
        """Return the format of a projection; None: it is a tensor."""
        found = self.formats.of_projection(name, self.layer)
        return found if found in PLANAR_BITS else None

    def _matrix(self, weight_format: WeightFormat | None, rows: int, cols: int) -> Tensor | PlanarWeights:
        return self.empty(rows, cols) if weight_format is None else self._matrices(weight_format, 1, rows, cols)

    def _matrices(self, weight_format: WeightFormat, count: int, rows: int, cols: int) -> Tensor | PlanarWeights:
        if weight_format not in PLANAR_BITS:
            return self.empty(count, rows, cols)
        return empty_planar(weight_format, (count, rows, cols), self.device)
