"""Where a model's weights are allocated, and in which form.

Weights are torch tensors, or, where the CPU kernels compute, packed in the order in which these read them. Both
forms can be cut into the parts that a checkpoint knows by name: `Destination`s, which a loader fills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeflow.kernels.cpu import PackedExperts, PackedRows, PackedWeight
from moeflow.kernels.weight_format import BITS_PER_VALUE, WeightFormat
from moeflow.layers.cached_experts import CachedExperts, ExpertPool

Weight = Tensor | PackedWeight
Destination = Tensor | PackedRows


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """In which format each kind of matrix is packed."""

    matrices: WeightFormat
    embeddings: WeightFormat  # and the output projection

    @property
    def router(self) -> WeightFormat:
        """Routers are small, and rounding them changes which experts are asked: never in integers."""
        return "bfloat16" if self.matrices == "bfloat16" else "float32"


class ExpertTensors:
    """A layer's experts as torch tensors; the packed form is `PackedExperts`."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """Take gate_up [E, 2I, H] (gate rows first) and down [E, H, I]."""
        self.gate_up = gate_up
        self.down = down

    def parts(self) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
        """Return each expert's gate [I, H], up [I, H] and down [H, I]."""
        gates, ups = self.gate_up.chunk(2, dim=1)
        return list(zip(gates, ups, self.down, strict=True))


@dataclass(frozen=True, slots=True)
class Placement:
    """Handed to each layer at construction. On the device "meta" nothing is allocated: shapes only."""

    dtype: torch.dtype  # of activations and of what is not packed
    device: torch.device
    packed: WeightFormats | None = None  # None: nothing is
    pool: ExpertPool | None = None  # experts come from there; None: all are resident
    on_route: Callable[[Tensor], None] | None = None  # told of each layer's choice, topk_ids [T, K], in order

    @property
    def bits_per_value(self) -> float:
        """Of nearly all weights."""
        return BITS_PER_VALUE[self.packed.matrices] if self.packed else self.dtype.itemsize * 8

    def empty(self, *shape: int) -> nn.Parameter:
        """Return an uninitialised weight that stays a tensor; the loader fills it."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)

    def matrix(self, rows: int, cols: int) -> Weight:
        """Return a matrix [rows, cols] to be filled. Raises: MemoryError, or RuntimeError from torch."""
        return self._matrix(rows, cols, self.packed.matrices if self.packed else None)

    def embedding(self, rows: int, cols: int) -> Weight:
        """Do the same for token embeddings and for the output projection."""
        return self._matrix(rows, cols, self.packed.embeddings if self.packed else None)

    def router(self, num_experts: int, hidden_size: int) -> Weight:
        """Do the same for what chooses experts."""
        return self._matrix(num_experts, hidden_size, self.packed.router if self.packed else None)

    def experts(
        self, num_experts: int, hidden_size: int, intermediate_size: int
    ) -> ExpertTensors | PackedExperts | CachedExperts:
        """Return a layer's experts, to be filled through their `parts` if they have some. Raises: as `matrix` does."""
        if self.pool is not None:
            return self.pool.add_layer()
        if self.packed is not None:
            return PackedExperts(num_experts, hidden_size, intermediate_size, self.packed.matrices)
        return ExpertTensors(
            self.empty(num_experts, 2 * intermediate_size, hidden_size),
            self.empty(num_experts, hidden_size, intermediate_size),
        )

    def _matrix(self, rows: int, cols: int, weight_format: WeightFormat | None) -> Weight:
        return self.empty(rows, cols) if weight_format is None else PackedWeight.allocate(rows, cols, weight_format)


def rows_of(weight: Weight, sizes: Sequence[int]) -> Sequence[Destination]:
    """Return parts of so many rows each, one below the other."""
    return weight.split(list(sizes))


def whole(weight: Weight) -> Destination:
    """Return all of it as one destination."""
    return weight if isinstance(weight, Tensor) else weight.split([weight.rows])[0]
