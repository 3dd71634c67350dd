"""Weights as torch tensors on a device, with experts as tensors or as slabs in main memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moeflow.checkpoint.packed.weight_memory import FreshMemory, WeightMemory
from moeflow.kernels.arrays import Array
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.models.layers.allocation.expert_homes import OnBothProcessors
from moeflow.models.layers.expert_weights import ExpertSlabs, ExpertWeights, slab_bytes
from moeflow.models.layers.weight_allocator import ExpertShape, WeightAllocator
from moeflow.parallel.blocks import unit_blocks

if TYPE_CHECKING:
    from moeflow.kernels.arrays import DType
    from moeflow.models.layers.ranks.summed_experts import ExpertDevices
    from moeflow.parallel.columns import Columns
    from moeflow.parallel.device_group import DeviceGroup
    from moeflow.parallel.group import Group

with on_demand(__name__):
    from moeflow.parallel import device_group


@dataclass(frozen=True, slots=True)
class TensorAllocator(WeightAllocator):
    """All weights in tensors of one type, routers perhaps in another."""

    router_dtype: DType | None = None  # None: as all other weights
    home: OnBothProcessors | None = field(default=None, kw_only=True)  # of experts; None: all are in tensors
    expert_devices: ExpertDevices | None = field(default=None, kw_only=True)  # that share experts; None: this has all

    @property
    def bits_per_value(self) -> float:
        """See `WeightAllocator`."""
        return self.dtype.itemsize * 8

    @property
    def rearranges(self) -> bool:
        """See `WeightAllocator`. On a GPU this spares launches."""
        return self.is_on_gpu

    @property
    def unit(self) -> int:
        """Columns of a network's last matrix that are not cut."""
        return 1

    @property
    def sums(self) -> DeviceGroup | None:
        """See `WeightAllocator`."""
        group = self.tensor_group
        assert group is None or isinstance(group, device_group.DeviceGroup), "ranks on devices add up"
        return group

    def units(self, count: int) -> Columns | None:
        """See `WeightAllocator.units`."""
        group = self.tensor_group
        return None if group is None else self.columns_of(group, "units", unit_blocks(count, group.size, self.unit))

    def columns_of(self, group: Group, name: str, blocks: Sequence[range]) -> Columns:
        """See `WeightAllocator.columns_of`."""
        assert isinstance(group, device_group.DeviceGroup), "ranks on devices add up"
        return device_group.SummedColumns(group, name, blocks)

    @property
    def is_on_gpu(self) -> bool:
        """Whether weights are not in main memory."""
        return torch.device(self.device or "cpu").type != "cpu"

    def empty(self, *shape: int) -> Array:
        """See `WeightAllocator.empty`."""
        return self._parameter(shape, self.dtype)

    def empty_float32(self, *shape: int) -> Array:
        """See `WeightAllocator.empty_float32`."""
        return self._parameter(shape, torch.float32)

    def router(self, num_experts: int, hidden_size: int, *, is_float32: bool = False) -> Array:
        """See `WeightAllocator.router`."""
        return self._parameter((num_experts, hidden_size), self._type_of_router(is_float32))

    def router_bias(self, num_experts: int, *, is_float32: bool = False) -> Array:
        """See `WeightAllocator.router_bias`."""
        return self._parameter((num_experts,), self._type_of_router(is_float32))

    def ones(self, size: int) -> Array:
        """See `WeightAllocator.ones`."""
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def experts(self, shape: ExpertShape, biases: ExpertBiases | None = None) -> ExpertWeights:
        """See `WeightAllocator.experts`."""
        if self.expert_devices is not None:
            part = self.expert_devices.part_of(shape, self.unit)
            return part.place(self._in_arrays(part.own_shape), biases)
        if self.home is None:
            return self._in_arrays(shape, biases)
        slots = self._in_arrays(replace(shape, num_experts=self.home.num_slots))
        return self.home.place(shape, slots, biases)

    def _type_of_router(self, is_float32: bool) -> DType:
        return torch.float32 if is_float32 else self.router_dtype or self.dtype

    def _parameter(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True, slots=True)
class SlabAllocator(TensorAllocator):
    """The same with the experts and dense networks as slabs in `memory`, wherever the device is."""

    memory: WeightMemory = field(default_factory=FreshMemory)

    @property
    def is_filled(self) -> bool:
        """See `WeightAllocator`."""
        return self.memory.is_filled

    @property
    def rearranges(self) -> bool:
        """See `WeightAllocator`. Tensors may be streamed as they are."""
        return False

    @property
    def has_networks(self) -> bool:
        """See `WeightAllocator`."""
        return True

    def experts(self, shape: ExpertShape, biases: ExpertBiases | None = None) -> ExpertWeights:
        """See `WeightAllocator.experts`."""
        if self.expert_devices is None:
            return self._slabs(shape, biases)
        part = self.expert_devices.part_of(shape, self.unit)
        return part.over(self._slabs(part.own_shape), biases)

    def network(self, shape: ExpertShape, biases: ExpertBiases | None = None) -> ExpertWeights:
        """See `WeightAllocator.network`."""
        return self.experts(shape, biases)

    def for_shared(self) -> WeightAllocator:
        """See `WeightAllocator.for_shared`. All devices have it whole, since sums are tasks of pipelines."""
        return replace(self, tensor_group=None)

    def _slabs(self, shape: ExpertShape, biases: ExpertBiases | None = None) -> ExpertSlabs:
        size = (shape.hidden_size, shape.intermediate_size)
        num_bytes = shape.num_experts * slab_bytes(*size, self.dtype, shape.kind)
        storage = self.memory.block(num_bytes).view(shape.num_experts, -1)
        return ExpertSlabs(*size, self.dtype, storage, shape.kind, biases)
