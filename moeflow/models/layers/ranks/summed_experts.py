"""A layer's experts on the devices of several ranks: each computes its part of every sum, and an all-reduce adds up.

A rank has whole experts, which are neighbours, or a slice of all of them. Every rank knows all tokens and routes them
alike, so nothing else is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from moeflow.kernels.cpu.packed_experts import ExpertKind
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.experts import ExpertsInSlots, fused_experts
from moeflow.kernels.triton.planar_weights import PlanarWeights
from moeflow.models.layers.expert_weights import Destination, ExpertSlabs, ExpertTensors, ExpertWeights
from moeflow.models.layers.rearranged import Rearranged
from moeflow.models.layers.weight_allocator import ExpertShape
from moeflow.parallel.blocks import even_blocks, unit_blocks
from moeflow.parallel.device_group import DeviceGroup

if TYPE_CHECKING:
    from torch import Tensor

_NAME: Final = "experts"  # for errors of the exchange


class ExpertDevices(msgspec.Struct, frozen=True):
    """How the devices of a group share the experts of each layer."""

    group: DeviceGroup
    has_slices: bool  # each device has a slice of every expert; else whole ones

    def part_of(self, shape: ExpertShape, unit: int) -> DevicePart:
        """Return this rank's part of a layer's experts; slices are whole units of so many hidden ones."""
        rank, number = self.group.rank, self.group.size
        if self.has_slices:
            return DevicePart(self, shape, unit_blocks(shape.intermediate_size, number, unit)[rank])
        return DevicePart(self, shape, even_blocks(shape.num_experts, number)[rank])


class DevicePart(msgspec.Struct, frozen=True):
    """What one device holds of a layer's experts."""

    devices: ExpertDevices
    shape: ExpertShape  # of all experts
    own: range  # hidden units of each expert, or experts

    @property
    def own_shape(self) -> ExpertShape:
        """The shape of this part."""
        shape, size = self.shape, len(self.own)
        if self.devices.has_slices:
            return replace(shape, intermediate_size=size)
        return replace(shape, num_experts=size)

    def place(self, own: ExpertTensors, biases: ExpertBiases | None) -> ExpertWeights:
        """Return a layer's experts; `own` has `own_shape`, `biases` are of all experts."""
        group = self.devices.group
        if self.devices.has_slices:
            return SlicedOnDevices(own, group, self.own, biases)
        return WholeOnDevices(own, group, self.own, self.shape.num_experts, biases)

    def over(self, own: ExpertSlabs, biases: ExpertBiases | None) -> SlicedSlabs:
        """Return the same of slices that move to the device, and whose sums are tasks of their own."""
        assert self.devices.has_slices, "pipelines stream slices"
        return SlicedSlabs(own, self.devices.group.rank, self.own, biases)


class WholeOnDevices(ExpertWeights):
    """Whole experts, some on each device."""

    def __init__(
        self, own: ExpertTensors, group: DeviceGroup, experts: range, num_experts: int, biases: ExpertBiases | None
    ) -> None:
        """`experts` are those of this rank, of `num_experts`."""
        self._own, self._group, self._experts, self._num_experts = own, group, experts, num_experts
        slots = torch.full((num_experts,), -1, dtype=torch.int32)
        slots[experts.start : experts.stop] = torch.arange(len(experts), dtype=torch.int32)
        device = own.down.values.device if isinstance(own.down, PlanarWeights) else own.down.device
        self._computing = ExpertsInSlots(own.gate_up, own.down, slots.to(device), own.kind.function, biases)

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `ExpertWeights`. Raises: GroupError."""
        total = self._group.all_reduce(_NAME, self._computing.sums(hidden, topk_ids, topk_weights))
        if residual is not None:
            total += residual
        return total.to(hidden.dtype)

    def parts(self) -> Sequence[tuple[Destination, ...] | None]:
        """Return the parts of this rank's experts; None for those of others."""
        own = iter(self._own.parts())
        return [next(own) if expert in self._experts else None for expert in range(self._num_experts)]


class SlicedOnDevices(ExpertWeights):
    """A slice of every expert, of as many hidden units on each device."""

    def __init__(self, own: ExpertTensors, group: DeviceGroup, units: range, biases: ExpertBiases | None) -> None:
        """`units` are those of this rank."""
        self._own, self._group, self._units, self._biases = own, group, units, biases
        self._own_biases: ExpertBiases | None = None  # made once they are loaded

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `ExpertWeights`. Raises: GroupError."""
        own = self._own
        if self._biases is not None and self._own_biases is None:
            self._own_biases = _cut_biases(self._biases, self._units, own.kind, self._group.rank)
        partial = fused_experts(
            hidden,
            own.gate_up,
            own.down,
            topk_ids,
            topk_weights,
            function=own.kind.function,
            biases=self._own_biases,
        )
        total = self._group.all_reduce(_NAME, partial)
        return total if residual is None else total.add_(residual)

    def parts(self) -> Sequence[tuple[Destination, ...]]:
        """Return this rank's rows of each expert's gate and up, and its columns of down."""
        return _parts_of_slices(self._own, self._units)


class SlicedSlabs(ExpertWeights):
    """The same slices in main memory, which a pipeline brings to the device."""

    def __init__(self, own: ExpertSlabs, rank: int, units: range, biases: ExpertBiases | None) -> None:
        """`units` are those of this rank."""
        self._own, self._rank, self._units, self._biases = own, rank, units, biases

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Not possible: the pipeline computes with `movable`."""
        raise AssertionError("a sum is a task of its own")

    def movable(self) -> ExpertSlabs:
        """Return the slices, which give a part of each sum, with the biases as they are loaded now."""
        if self._biases is None:
            return self._own
        return self._own.with_biases(_cut_biases(self._biases, self._units, self._own.kind, self._rank))

    def parts(self) -> Sequence[tuple[Destination, ...]]:
        """Return this rank's rows of each expert's gate and up, and its columns of down."""
        return _parts_of_slices(self._own, self._units)


def _parts_of_slices(own: ExpertTensors | ExpertSlabs, units: range) -> Sequence[tuple[Destination, ...]]:
    return [
        (*(Rearranged([(up, [units])]) for up in ups), Rearranged([(down, [units])], dim=1))
        for *ups, down in own.parts()
    ]


def _cut_biases(biases: ExpertBiases, units: range, kind: ExpertKind, rank: int) -> ExpertBiases:
    """Return the biases of a rank's units; the first rank adds those of outputs."""
    up = biases.up.view(len(biases.up), kind.num_ups, -1)[:, :, units.start : units.stop]
    down = biases.down if rank == 0 else torch.zeros_like(biases.down)
    return ExpertBiases(up.reshape(len(up), -1), down)
