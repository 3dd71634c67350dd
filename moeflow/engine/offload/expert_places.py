"""Where the experts of all layers lie on a device: some stay, the others take turns in two halves of a buffer.

The last experts of a layer stay, because the host may share the first ones. On a GPU all of them lie in one stack of
rows, so that its kernels find each by a table of rows and need no list of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.expert_weights import ExpertSlabs
from moeflow.pipeline.devices.cuda_device import CudaDevice
from moeflow.pipeline.devices.offload_device import OffloadDevice
from moeflow.pipeline.devices.paged_weights import NUM_HALVES, PagedWeights


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """The streamed weights, and each layer twice: with its streamed experts in either half of the buffer."""

    weights: PagedWeights
    halves: Sequence[Sequence[DecoderLayer]]


def place_experts(layers: Sequence[DecoderLayer], num_resident: int, device: OffloadDevice) -> ExpertPlaces:
    """Copy so many experts of each layer to the device. Raises: CapacityError."""
    parts = [_Parts.of(layer, num_resident) for layer in layers]
    sizes = [part.slab_bytes for part in parts if isinstance(part.layer.movable_experts, ExpertSlabs)]
    if isinstance(device, CudaDevice) and sizes:
        return _in_stack(parts, device, max(set(sizes), key=sizes.count))
    resident = [device.hold(part.resident, "experts that stay") for part in parts]
    weights = PagedWeights([part.streamed.view(-1) for part in parts], device)
    halves = [
        [part.over([*_rows(half, part.streamed), *stay]) for half in weights.halves(number)]
        for number, (part, stay) in enumerate(zip(parts, resident, strict=True))
    ]
    return ExpertPlaces(weights, halves)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A layer's experts in main memory: [n, bytes] uint8 each."""

    layer: DecoderLayer
    streamed: Tensor
    resident: Tensor

    @classmethod
    def of(cls, layer: DecoderLayer, num_resident: int) -> _Parts:
        experts = layer.movable_experts
        storage = torch.empty(0, 0, dtype=torch.uint8) if experts is None else experts.storage
        assert isinstance(storage, Tensor)  # as loaded: all rows in one piece
        num_streamed = max(len(storage) - num_resident, 0)
        return cls(layer, storage[:num_streamed], storage[num_streamed:])

    @property
    def slab_bytes(self) -> int:
        return self.streamed.shape[1]

    def has_slabs(self, slab_bytes: int) -> bool:
        return isinstance(self.layer.movable_experts, ExpertSlabs) and self.slab_bytes == slab_bytes

    def over(self, rows: Sequence[Tensor]) -> DecoderLayer:
        experts = self.layer.movable_experts
        return self.layer if experts is None else self.layer.with_experts(experts.at(rows))

    def over_stack(self, stack: Tensor, numbers: Sequence[int]) -> DecoderLayer:
        experts = self.layer.movable_experts
        assert isinstance(experts, ExpertSlabs)
        return self.layer.with_experts(experts.in_stack(stack, numbers))


def _in_stack(parts: Sequence[_Parts], device: CudaDevice, slab_bytes: int) -> ExpertPlaces:
    """Place experts of one size in a stack, which ends with the two halves; those of other sizes by themselves."""
    num_resident = sum(len(part.resident) for part in parts if part.has_slabs(slab_bytes))
    rows_of_half = -(-max(part.streamed.nbytes for part in parts) // slab_bytes)
    num_rows = num_resident + NUM_HALVES * rows_of_half
    stack = device.allocate(num_rows * slab_bytes, "experts that stay, and two layers' streamed ones")
    stack = stack.view(num_rows, slab_bytes)
    buffer = stack[num_resident:].view(NUM_HALVES, -1)
    weights = PagedWeights([part.streamed.view(-1) for part in parts], device, buffer)
    halves, end = [], 0
    for number, part in enumerate(parts):
        if part.has_slabs(slab_bytes):
            start, end = end, end + len(part.resident)
            device.fill(stack[start:end], part.resident)
            firsts = [num_resident + half * rows_of_half for half in range(NUM_HALVES)]
            numbers = ([*range(first, first + len(part.streamed)), *range(start, end)] for first in firsts)
            halves.append([part.over_stack(stack, each) for each in numbers])
        else:
            stay = device.hold(part.resident, "networks that stay")
            halves.append([part.over([*_rows(half, part.streamed), *stay]) for half in weights.halves(number)])
    return ExpertPlaces(weights, halves)


def _rows(half: Tensor, streamed: Tensor) -> Sequence[Tensor]:
    return list(half.view(streamed.shape)) if len(streamed) else []
