"""The experts of a layer on both processors, and how a pass computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec
import torch

from moeflow.core.hybrid_config import HybridConfig
from moeflow.experts.hybrid.slot_tables import SlotTables
from moeflow.kernels.activation import Activation
from moeflow.kernels.cpu.expert_slots import PresentExperts
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_weight import PackedRows
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.experts import ExpertsInSlots
from moeflow.kernels.packed_bands import ExpertLayout, PlainMatrices, empty_like
from moeflow.kernels.weight_format import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor


ExpertFormats: TypeAlias = tuple[WeightFormat, WeightFormat]  # of gates and ups, and of downs


class SlotMatrices(msgspec.Struct, frozen=True):
    """The memory of slots on the GPU."""

    gate_up: PlainMatrices  # [slots, 2I, H] or [slots, I, H]
    down: PlainMatrices  # [slots, H, I]

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.down)

    def others(self, count: int) -> SlotMatrices:
        """Return so many further slots of the same kind. Raises: RuntimeError from torch."""
        return SlotMatrices(empty_like(self.gate_up, count), empty_like(self.down, count))

    def holding(self, slots: Tensor, function: Activation, biases: ExpertBiases | None) -> ExpertsInSlots:
        """Return the experts that a table has in these slots."""
        return ExpertsInSlots(self.gate_up, self.down, slots, function, biases)


class ExpertSums(Protocol):
    """A way of computing a layer's experts."""

    def sums(self, experts: HybridExperts, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts: [T, H] float32 on the GPU."""


class HybridLayers:
    """The layers with experts, in order."""

    def __init__(
        self, config: HybridConfig, formats: Sequence[ExpertFormats], num_experts: int, device: torch.device
    ) -> None:
        """Begin without layers; `formats` are those of each layer's packed experts."""
        self.config, self.device = config, device
        self.tables = SlotTables(len(formats), num_experts, device)
        self._formats = formats
        self.experts: list[HybridExperts] = []
        self.way: ExpertSums | None = None  # of the current pass

    @property
    def next_formats(self) -> ExpertFormats:
        """The formats of packed experts in the next layer."""
        return self._formats[len(self.experts)]

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest packed expert."""
        return max(it.layout.num_bytes for it in self.experts)

    def add(self, matrices: SlotMatrices, packed: PackedExperts, biases: ExpertBiases | None) -> HybridExperts:
        """Return the experts of the next layer, to be filled by a loader; `biases` are on the GPU."""
        self.experts.append(HybridExperts(self, len(self.experts), matrices, packed, biases))
        return self.experts[-1]


class HybridExperts:
    """A layer's experts: all of them packed in main memory, some also in slots on the GPU."""

    def __init__(
        self,
        layers: HybridLayers,
        layer: int,
        matrices: SlotMatrices,
        packed: PackedExperts,
        biases: ExpertBiases | None,
    ) -> None:
        """`layer` counts layers with experts."""
        self._layers, self.layer, self.matrices, self.packed = layers, layer, matrices, packed
        self.on_gpu = matrices.holding(layers.tables.on_gpu[layer], packed.kind.function, biases)
        self.layout = ExpertLayout.of(packed)
        self._on_cpu: PresentExperts | None = None

    @property
    def on_cpu(self) -> PresentExperts:
        """The experts that the CPU computes, once weights are loaded."""
        assert self._on_cpu is not None, "nothing is loaded"
        return self._on_cpu

    def loaded(self) -> None:
        """Take note that weights and biases are there."""
        biases = self.on_gpu.biases
        if biases is not None:
            self.packed = self.packed.with_biases(ExpertBiases(*(each.float().cpu() for each in biases)))
        self._on_cpu = PresentExperts(self.packed, self._layers.tables.on_cpu[self.layer])

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the GPU's sum plus the CPU's plus the residual, added in this order.

        Shapes: hidden and residual [T, H], topk_ids [T, K] int64, topk_weights [T, K] float32 -> [T, H].
        """
        assert self._layers.way is not None, "nothing is loaded"
        total = self._layers.way.sums(self, hidden, topk_ids, topk_weights)
        if residual is not None:
            total.add_(residual)
        return total.to(hidden.dtype)

    def parts(self) -> list[tuple[PackedRows, ...]]:
        """Return what a loader fills; slots are then filled from main memory."""
        return self.packed.parts()

    def for_kernels(self) -> None:
        """Return nothing: the CPU alone cannot compute the layer."""

    def movable(self) -> None:
        """Return nothing: a slot's expert changes."""
