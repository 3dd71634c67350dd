"""What a layer asks of its experts, wherever their weights are, and the kinds of weights that are torch tensors.

Two more kinds are written elsewhere: `PackedExperts` in the CPU kernels' order, and `CachedExperts`, with only some in
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu.latent_weights import PackedUpProjection
from moeflow.kernels.cpu.packed_experts import SWIGLU, ExpertKind, PackedExperts
from moeflow.kernels.cpu.packed_weight import PackedRows
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.experts import fused_experts, fused_experts_norm
from moeflow.kernels.norm import NormWeights
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton import launching
from moeflow.kernels.triton.planar_rows import PlanarRows
from moeflow.kernels.triton.planar_stack import matrix_rows
from moeflow.kernels.triton.planar_weights import PlanarWeights
from moeflow.models.layers.rearranged import Rearranged

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels.triton import experts as triton_experts

# A part of the weights that a checkpoint knows by name.
Destination: TypeAlias = "Array | PackedRows | PackedUpProjection | PlanarRows | Rearranged"


class ExpertWeights(Protocol):
    """The experts of a layer. A new kind has `compute`, and the other methods as far as it supports them."""

    def compute(self, hidden: Array, topk_ids: Array, topk_weights: Array, residual: Array | None = None) -> Array:
        """Return the weighted sum of each token's experts plus the residual.

        Shapes: hidden and residual [T, H], topk_ids [T, K] int64, topk_weights [T, K] float32 -> [T, H].
        """
        ...

    def parts(self) -> Sequence[tuple[Destination, ...] | None]:
        """Return each expert's gate [I, H] if any, up [I, H] and down [H, I], to be filled; none if others fill them.

        None for an expert that another process has.
        """
        return ()

    def for_kernels(self) -> tuple[PackedExperts, Array | None, ExpertBiases | None] | None:
        """Return the memory that the CPU kernels read, where in it each expert is, [E] int32 (None: in order), and
        biases.

        None if the kernels cannot compute with these experts.
        """
        return None

    def movable(self) -> PackedExperts | ExpertSlabs | None:
        """Return these experts if their rows of memory may be copied elsewhere and computed with there."""
        return None


class ExpertTensors(ExpertWeights):
    """All experts in two tensors, or two stacks of planar matrices."""

    def __init__(
        self,
        gate_up: Tensor | PlanarWeights,
        down: Tensor | PlanarWeights,
        kind: ExpertKind = SWIGLU,
        biases: ExpertBiases | None = None,
    ) -> None:
        """Take gate_up [E, 2I, H] (gate rows first), or without a gate [E, I, H], and down [E, H, I]."""
        self.gate_up = gate_up
        self.down = down
        self.kind = kind
        self.biases = biases

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute with torch."""
        return _compute(self, hidden, topk_ids, topk_weights, residual)

    def compute_and_norm(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor, norm: NormWeights
    ) -> tuple[Tensor, Tensor]:
        """Return the same sum, and that normalised."""
        return fused_experts_norm(
            hidden,
            (self.gate_up, self.down),
            topk_ids,
            topk_weights,
            function=self.kind.function,
            biases=self.biases,
            residual=residual,
            norm=norm,
        )

    def parts(self) -> Sequence[tuple[Destination, ...]]:
        """Return views of the tensors."""
        gate_up, down = self.gate_up, self.down
        sizes = [down.shape[2]] * self.kind.num_ups
        experts = range(len(down))
        return [(*matrix_rows(gate_up, it, sizes), *matrix_rows(down, it, [down.shape[1]])) for it in experts]


class ExpertSlabs(ExpertWeights):
    """Each expert's gate, up and down matrices in a row of bytes, which can lie anywhere.

    So an expert reaches a device in one copy, and is computed with where it lies. A dense network may be one of them.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        storage: Tensor | Sequence[Tensor],
        kind: ExpertKind = SWIGLU,
        biases: ExpertBiases | None = None,
    ) -> None:
        """Take `storage` [E, `slab_bytes`] uint8, whose rows hold an expert each and may be on any device."""
        self.storage = storage
        self.kind = kind
        self.biases = biases
        self._shape = (hidden_size, intermediate_size)
        self._dtype = dtype
        up_rows = kind.num_ups * intermediate_size
        up_values = up_rows * hidden_size
        self.gate_up: Tensor | list[Tensor]  # [E, 2I, H], gate rows first
        self.down: Tensor | list[Tensor]  # [E, H, I]
        if isinstance(storage, torch.Tensor):
            values = storage.view(dtype)
            self.gate_up = values[:, :up_values].view(-1, up_rows, hidden_size)
            self.down = values[:, up_values:].view(-1, hidden_size, intermediate_size)
        else:  # rows that lie anywhere
            rows = [row.view(dtype) for row in storage]
            self.gate_up = [each[:up_values].view(-1, hidden_size) for each in rows]
            self.down = [each[up_values:].view(hidden_size, -1) for each in rows]

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute with torch."""
        return _compute(self, hidden, topk_ids, topk_weights, residual)

    @property
    def num_experts(self) -> int:
        """How many there are."""
        return len(self.storage)

    def at(self, rows: Sequence[Tensor]) -> ExpertSlabs:
        """Return these experts as they lie, or will lie, in other rows of memory."""
        return ExpertSlabs(*self._shape, self._dtype, rows, self.kind, self.biases)

    def with_biases(self, biases: ExpertBiases) -> ExpertSlabs:
        """Return these experts with other biases."""
        return ExpertSlabs(*self._shape, self._dtype, self.storage, self.kind, biases)

    def in_stack(self, stack: Tensor, numbers: Sequence[int]) -> StackedSlabs:
        """Return these experts as they lie, or will lie, in rows of a stack."""
        whole = ExpertSlabs(*self._shape, self._dtype, stack, self.kind, self.biases)
        return StackedSlabs(whole, self.at([stack[number] for number in numbers]), numbers)

    def movable(self) -> ExpertSlabs:
        """Return these experts."""
        return self

    def parts(self) -> Sequence[tuple[Tensor, ...]]:
        """Return views of the rows."""
        ups = (gate_up.chunk(self.kind.num_matrices - 1) for gate_up in self.gate_up)
        return [(*each, down) for each, down in zip(ups, self.down, strict=True)]


class StackedSlabs(ExpertWeights):
    """Experts in some rows of a stack, which kernels of a GPU find by a table."""

    def __init__(self, stack: ExpertSlabs, experts: ExpertSlabs, numbers: Sequence[int]) -> None:
        """`numbers` are those of the experts' rows."""
        self.experts = experts
        self._stack = stack
        assert isinstance(stack.storage, torch.Tensor)
        self._numbers = torch.tensor(numbers, dtype=torch.int32, device=stack.storage.device)

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute without a list of matrices, where kernels run."""
        if not launching.accepts(hidden):
            return self.experts.compute(hidden, topk_ids, topk_weights, residual)
        gate_up, down = self._stack.gate_up, self._stack.down
        assert isinstance(gate_up, torch.Tensor)
        assert isinstance(down, torch.Tensor)
        return triton_experts.fused_experts(
            hidden,
            gate_up,
            down,
            topk_ids,
            topk_weights,
            function=self._stack.kind.function,
            biases=self._stack.biases,
            residual=residual,
            slots=self._numbers,
        )

    def movable(self) -> ExpertSlabs:
        """Return the experts."""
        return self.experts

    def parts(self) -> Sequence[tuple[Destination, ...]]:
        """Return views of the rows."""
        return self.experts.parts()


class OffloadedExperts(ExpertWeights):
    """Stands for a layer's experts in a model that is built for its other weights only."""

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Not possible."""
        raise AssertionError("these experts have no weights")


MovableExperts = PackedExperts | ExpertSlabs
MovedExperts = MovableExperts | StackedSlabs


def slab_bytes(hidden_size: int, intermediate_size: int, dtype: torch.dtype, kind: ExpertKind = SWIGLU) -> int:
    """Bytes of an expert of `ExpertSlabs`."""
    return kind.num_matrices * hidden_size * intermediate_size * dtype.itemsize


def _compute(
    experts: ExpertTensors | ExpertSlabs,
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    residual: Tensor | None,
) -> Tensor:
    return fused_experts(
        hidden,
        experts.gate_up,
        experts.down,
        topk_ids,
        topk_weights,
        function=experts.kind.function,
        biases=experts.biases,
        residual=residual,
    )
