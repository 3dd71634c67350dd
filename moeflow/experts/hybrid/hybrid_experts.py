"""The experts of a layer on both processors, and how a pass computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import torch

from moeflow.core.hybrid_config import HybridConfig
from moeflow.experts.hybrid.resident_runs import ResidentRuns
from moeflow.experts.hybrid.slot_tables import SlotTables
from moeflow.kernels.activation import Activation
from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu.expert_slots import PresentExperts
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.experts import ExpertsInSlots
from moeflow.kernels.packed_bands import ExpertLayout, PlainMatrices, empty_like
from moeflow.kernels.weight_format import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.experts.cached_experts import ExpertPool


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


class HostSums(Protocol):
    """A way of computing the CPU's experts of a layer."""

    def sums(self, x: Array, topk_ids: Array, topk_weights: Array, out: Array, /) -> Callable[[], None]:
        """See `PresentExperts.sums`."""


class HybridLayers:
    """The layers with experts, in order."""

    def __init__(
        self,
        config: HybridConfig,
        formats: Sequence[ExpertFormats],
        num_experts: int,
        device: torch.device,
        disk: ExpertPool | None = None,
        num_joined: int = 0,
    ) -> None:
        """Begin without layers; `formats` are those of each layer's packed experts.

        `disk` has slots in main memory for experts from disk; None: main memory has all experts. So many parts of the
        shared expert are joined with the others, on the GPU.
        """
        self.config, self.device, self.disk, self.num_joined = config, device, disk, num_joined
        self.runs = None if disk is None else ResidentRuns(disk.cache)
        always = range(config.num_gpu_experts, config.num_gpu_experts + num_joined)
        self.tables = SlotTables(len(formats), num_experts, device, always)
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


class HybridExperts:
    """A layer's experts: all of them packed in main memory, some also in slots on the GPU."""

    def __init__(
        self,
        layers: HybridLayers,
        matrices: SlotMatrices,
        packed: PackedExperts,
        biases: ExpertBiases | None,
        joined: Sequence[tuple[Any, ...]] = (),
        *,
        is_filled: bool = False,
    ) -> None:
        """Become the next layer's experts; `biases` are on the GPU.

        A loader fills `joined`, the slots of the shared expert's parts, and `packed` unless it is filled.
        """
        self._joined, self._is_filled = joined, is_filled
        self._layers, self.layer, self.matrices, self.packed = layers, len(layers.experts), matrices, packed
        layers.experts.append(self)
        self.on_gpu = matrices.holding(layers.tables.on_gpu[self.layer], packed.kind.function, biases)
        self.layout = ExpertLayout.of(packed)
        self._on_cpu: HostSums | None = None

    @property
    def on_cpu(self) -> HostSums:
        """The experts that the CPU computes, once weights are loaded."""
        assert self._on_cpu is not None, "nothing is loaded"
        return self._on_cpu

    def loaded(self) -> None:
        """Take note that weights and biases are there."""
        biases = self.on_gpu.biases
        on_host = None if biases is None else ExpertBiases(*(each.float().cpu() for each in biases))
        self._on_cpu = self._host_sums(self._layers, on_host)

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the GPU's sum plus the CPU's plus the residual, added in this order.

        Shapes: hidden and residual [T, H], topk_ids [T, K] int64, topk_weights [T, K] float32 -> [T, H].
        """
        assert self._layers.way is not None, "nothing is loaded"
        total = self._layers.way.sums(self, hidden, topk_ids, topk_weights)
        if residual is not None:
            total.add_(residual)
        return total.to(hidden.dtype)

    def parts(self) -> Sequence[tuple[Any, ...] | None]:
        """Return what a loader fills, None for experts that are there; other slots are filled from main memory."""
        experts = [None] * self._layers.tables.num_experts if self._is_filled else self.packed.parts()
        return [*experts, *self._joined]

    def slabs(self, experts: Sequence[int], memory: Tensor, *, is_scan: bool) -> Iterable[Tensor]:
        """Return packed experts, each [`layout.num_bytes` or more] uint8, perhaps copied to `memory`, [n, bytes].

        Scans are passes that need all experts that are not on the GPU, layer after layer.
        """
        return [self.packed.storage[expert] for expert in experts]

    def _host_sums(self, layers: HybridLayers, biases: ExpertBiases | None) -> HostSums:
        self.packed = self.packed.with_biases(biases)
        return PresentExperts(self.packed, layers.tables.on_cpu[self.layer])

    def for_kernels(self) -> None:
        """Return nothing: the CPU alone cannot compute the layer."""

    def movable(self) -> None:
        """Return nothing: a slot's expert changes."""
