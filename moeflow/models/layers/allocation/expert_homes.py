"""Homes of packed experts: main memory, the cache over slabs on disk, and memory that ranks share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from moeflow.checkpoint.packed.weight_memory import WeightMemory
from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu.packed_experts import PackedExperts, expert_bytes
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.lazy_memory import LazyMemory
from moeflow.kernels.on_demand import on_demand
from moeflow.kernels.weight_format import WeightFormat
from moeflow.models.layers.expert_weights import ExpertTensors, ExpertWeights, OffloadedExperts
from moeflow.models.layers.weight_allocator import ExpertShape
from moeflow.parallel.blocks import band_blocks
from moeflow.parallel.columns import Columns
from moeflow.parallel.group import Group

if TYPE_CHECKING:
    from moeflow.experts.cached_experts import ExpertPool
    from moeflow.experts.hybrid.hybrid_experts import HybridExperts, HybridLayers
    from moeflow.models.layers.ranks.expert_ranks import ExpertRanks

with on_demand(__name__):
    from moeflow.experts.hybrid import disk_experts, hybrid_experts
    from moeflow.kernels.cpu import expert_slices
    from moeflow.models.layers.ranks import sliced_experts


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """A layer's experts as they are packed."""

    shape: ExpertShape
    formats: tuple[WeightFormat, WeightFormat]  # of gates and ups, and of downs
    is_wide: bool  # see `WeightFormats`
    memory: WeightMemory
    biases: ExpertBiases | None = None
    is_network: bool = False  # a dense network as one expert, whose memory is a block of its own

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        shape, (up, down) = self.shape, self.formats
        size = (shape.hidden_size, shape.intermediate_size)
        return expert_bytes(*size, up, down_format=down, is_gated=shape.kind.is_gated)

    def rows(self, num_bytes: int) -> Array | None:
        """Return memory [E, num_bytes or more] uint8; None: the experts are kept elsewhere. Raises: MemoryError."""
        if self.is_network:
            return self.memory.block(num_bytes).reshape(1, num_bytes)
        return self.memory.experts(self.shape.num_experts, num_bytes)

    def over(self, storage: Array) -> PackedExperts:
        """Return the experts in `storage`, [E, expert_bytes or more] uint8."""
        shape = self.shape
        return PackedExperts(
            shape.num_experts,
            shape.hidden_size,
            shape.intermediate_size,
            self.formats[0],
            down_format=self.formats[1],
            kind=shape.kind,
            is_wide=self.is_wide,
            storage=storage,
        ).with_biases(self.biases)


class ExpertHome(Protocol):
    """Places the packed experts of one layer after another."""

    def place(self, experts: PackedSpec) -> ExpertWeights:
        """Return the next layer's experts. Raises: MemoryError."""
        ...


class InMemory:
    """All experts in this process's memory, unless that keeps experts elsewhere."""

    def place(self, experts: PackedSpec) -> ExpertWeights:
        """See `ExpertHome.place`."""
        storage = experts.rows(experts.expert_bytes)
        return OffloadedExperts() if storage is None else experts.over(storage)


@dataclass(frozen=True, slots=True)
class InCache:
    """Experts in the slots of a cache, over slabs on disk."""

    pool: ExpertPool

    def place(self, experts: PackedSpec) -> ExpertWeights:
        """See `ExpertHome.place`."""
        return self.pool.add_layer(experts.biases)


class OnBothProcessors(msgspec.Struct, frozen=True):
    """All experts packed in main memory or on disk, and slots for some of them on a GPU."""

    layers: HybridLayers
    is_wide: bool  # see `WeightFormats`
    memory: WeightMemory

    @property
    def num_slots(self) -> int:
        """Slots of a layer."""
        return self.layers.config.num_gpu_experts + self.layers.num_joined

    def place(self, shape: ExpertShape, slots: ExpertTensors, biases: ExpertBiases | None) -> HybridExperts:
        """Return the next layer's experts; `biases` are on the GPU. Raises: MemoryError."""
        layers, matrices = self.layers, hybrid_experts.SlotMatrices(slots.gate_up, slots.down)
        joined = slots.parts()[layers.config.num_gpu_experts :]
        if layers.disk is not None:
            memory = layers.disk.slots_of(len(layers.experts))
            return disk_experts.ExpertsOnDisk(layers, matrices, memory, biases, joined, is_filled=True)
        shape = replace(shape, num_experts=layers.tables.num_experts)
        spec = PackedSpec(shape, self.layers.next_formats, self.is_wide, self.memory)
        storage = spec.rows(spec.expert_bytes)
        assert storage is not None  # main memory has all of them
        packed, is_filled = spec.over(storage), self.memory.is_filled
        return hybrid_experts.HybridExperts(layers, matrices, packed, biases, joined, is_filled=is_filled)


@dataclass(frozen=True, slots=True)
class WholeOnRanks:
    """Whole experts, some on each rank."""

    ranks: ExpertRanks

    def place(self, experts: PackedSpec) -> ExpertWeights:
        """See `ExpertHome.place`. The rank touches the memory of its own experts only."""
        if experts.memory.is_filled:
            storage = experts.rows(experts.expert_bytes)
            assert storage is not None  # ranks keep their experts in memory
            return self.ranks.add_layer(experts.over(storage), None)
        count, num_bytes = experts.shape.num_experts, experts.expert_bytes
        memory = LazyMemory(count * num_bytes)
        return self.ranks.add_layer(experts.over(memory.tensor.view(count, num_bytes)), memory)


@dataclass(frozen=True, slots=True)
class SlicedOnRanks:
    """A slice of each expert on each rank."""

    group: Group

    def place(self, experts: PackedSpec) -> sliced_experts.SlicedExperts:
        """See `ExpertHome.place`."""
        group, shape = self.group, experts.shape
        is_whole = experts.memory.is_filled  # with whole experts; a rank uses its slices
        units, outputs = (band_blocks(count, group.size) for count in (shape.intermediate_size, shape.hidden_size))
        own_shape = expert_slices.SliceShape(
            hidden=shape.hidden_size,
            width=shape.intermediate_size,
            units=units[group.rank],
            outputs=outputs[group.rank],
            up_format=experts.formats[0],
            down_format=experts.formats[1],
            num_ups=shape.kind.num_ups,
        )
        storage = experts.rows(own_shape.whole_bytes if is_whole else own_shape.up_bytes + own_shape.down_bytes)
        assert storage is not None  # ranks keep their experts in memory
        own = expert_slices.PackedExpertSlices(
            own_shape, storage, kind=shape.kind, biases=experts.biases, is_wide=experts.is_wide, is_whole=is_whole
        )
        return sliced_experts.SlicedExperts(own, Columns(group, "units", units), Columns(group, "outputs", outputs))


def home_on_ranks(group: Group | None, ranks: ExpertRanks | None) -> ExpertHome:
    """Return the home of experts that the ranks of `group` share; `ranks` None: as slices. `group` None: memory."""
    if group is None:
        return InMemory()
    return SlicedOnRanks(group) if ranks is None else WholeOnRanks(ranks)
