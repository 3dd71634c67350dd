"""Where a model's weights are allocated, and in which form.

Weights are torch tensors, or, where the CPU kernels compute, packed in the order in which these read them. Both
forms can be cut into the parts that a checkpoint knows by name: `Destination`s, which a loader fills.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moeflow.checkpoint.packed.weight_memory import FreshMemory, WeightMemory
from moeflow.experts.cached_experts import ExpertPool
from moeflow.kernels.cpu.packed_weights import PackedExperts, PackedWeight, expert_bytes, matrix_bytes
from moeflow.kernels.lazy_memory import LazyMemory
from moeflow.kernels.weight_format import BITS_PER_VALUE, WeightFormat
from moeflow.models.layers.expert_ranks import ExpertRanks
from moeflow.models.layers.expert_weights import (
    Destination,
    ExpertSlabs,
    ExpertTensors,
    ExpertWeights,
    MovableExperts,
    OffloadedExperts,
    slab_bytes,
)

Weight = Tensor | PackedWeight


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """In which format each kind of matrix is packed."""

    matrices: WeightFormat
    embeddings: WeightFormat  # and the output projection
    routers: WeightFormat = "float32"  # small, and rounding them changes which experts are asked: never in integers
    is_wide: bool = False  # whether integers meet activations of 16 bits, see `PackedWeight`


@dataclass(frozen=True, slots=True)
class WeightAllocator:
    """Handed to each layer at construction. On the device "meta" nothing is allocated: shapes only."""

    dtype: torch.dtype  # of activations and of what is not packed
    device: torch.device
    packed: WeightFormats | None = None  # None: nothing is
    memory: WeightMemory = field(default_factory=FreshMemory)  # where what is packed lies, and what stays beside it
    pool: ExpertPool | None = None  # experts come from there; None: all are resident
    router_dtype: torch.dtype | None = None  # of routers that are not packed; None: as all else
    has_slabs: bool = False  # experts that are not packed lie in `memory` as slabs, wherever the device is
    ranks: ExpertRanks | None = None  # that have some of each layer's experts each; None: this process has all
    on_route: Callable[[Tensor], None] | None = None  # told of each layer's choice, topk_ids [T, K], in order

    @property
    def bits_per_value(self) -> float:
        """Of nearly all weights."""
        return BITS_PER_VALUE[self.packed.matrices] if self.packed else self.dtype.itemsize * 8

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return a weight that stays a tensor, to be filled. Raises: as `matrix` does."""
        if self.packed is None:
            weight = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        else:
            weight = self.memory.block(math.prod(shape) * self.dtype.itemsize).view(self.dtype).view(shape)
        return nn.Parameter(weight, requires_grad=False)

    def matrix(self, rows: int, cols: int) -> Weight:
        """Return a matrix [rows, cols] to be filled. Raises: MemoryError, or RuntimeError from torch."""
        return self._matrix(rows, cols, self.packed.matrices if self.packed else None)

    def embedding(self, rows: int, cols: int) -> Weight:
        """Do the same for token embeddings and for the output projection."""
        return self._matrix(rows, cols, self.packed.embeddings if self.packed else None)

    def router(self, num_experts: int, hidden_size: int) -> Weight:
        """Do the same for what chooses experts."""
        if self.packed is None:
            return self.empty(num_experts, hidden_size, dtype=self.router_dtype)
        return self._matrix(num_experts, hidden_size, self.packed.routers)

    def experts(self, num_experts: int, hidden_size: int, intermediate_size: int) -> ExpertWeights:
        """Return a layer's experts, to be filled through their `parts` if they have some. Raises: as `matrix` does."""
        if self.pool is not None:
            return self.pool.add_layer()
        if self.packed is not None:
            return self._packed_experts(num_experts, hidden_size, intermediate_size, self.packed)
        if self.has_slabs:
            return self._slabs(num_experts, hidden_size, intermediate_size)
        return ExpertTensors(
            self.empty(num_experts, 2 * intermediate_size, hidden_size),
            self.empty(num_experts, hidden_size, intermediate_size),
        )

    def _packed_experts(
        self, num_experts: int, hidden_size: int, intermediate_size: int, formats: WeightFormats
    ) -> ExpertWeights:
        num_bytes = expert_bytes(hidden_size, intermediate_size, formats.matrices)
        own = None  # memory that a rank fills some of
        if self.ranks is not None and not self.memory.is_filled:
            own = LazyMemory(num_experts * num_bytes)
            storage: Tensor | None = own.tensor.view(num_experts, num_bytes)
        else:
            storage = self.memory.experts(num_experts, num_bytes)
        if storage is None:
            return OffloadedExperts()
        experts = PackedExperts(
            num_experts, hidden_size, intermediate_size, formats.matrices, is_wide=formats.is_wide, storage=storage
        )
        return experts if self.ranks is None else self.ranks.add_layer(experts, own)

    def network(self, hidden_size: int, intermediate_size: int) -> MovableExperts | None:
        """Return a dense network as the one expert of a layer, to be filled likewise; None: it is one of tensors."""
        if self.packed is None:
            return self._slabs(1, hidden_size, intermediate_size) if self.has_slabs else None
        matrices, is_wide = self.packed.matrices, self.packed.is_wide
        storage = self.memory.block(expert_bytes(hidden_size, intermediate_size, matrices)).view(1, -1)
        return PackedExperts(1, hidden_size, intermediate_size, matrices, is_wide=is_wide, storage=storage)

    def _slabs(self, num_experts: int, hidden_size: int, intermediate_size: int) -> ExpertSlabs:
        num_bytes = num_experts * slab_bytes(hidden_size, intermediate_size, self.dtype)
        storage = self.memory.block(num_bytes).view(num_experts, -1)
        return ExpertSlabs(hidden_size, intermediate_size, self.dtype, storage)

    def _matrix(self, rows: int, cols: int, weight_format: WeightFormat | None) -> Weight:
        if weight_format is None or self.packed is None:
            return self.empty(rows, cols)
        storage = self.memory.block(matrix_bytes(weight_format, rows, cols))
        return PackedWeight(storage, weight_format, rows, cols, is_wide=self.packed.is_wide)


def rows_of(weight: Weight, sizes: Sequence[int]) -> Sequence[Destination]:
    """Return parts of so many rows each, one below the other."""
    return weight.split(list(sizes))


def whole(weight: Weight) -> Destination:
    """Return all of it as one destination."""
    return weight if isinstance(weight, Tensor) else weight.split([weight.rows])[0]
