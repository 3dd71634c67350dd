"""The dense feed-forward network: an expert layer with one expert, which every token goes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from moeflow.kernels.activation import activate
from moeflow.kernels.cpu.packed_experts import SWIGLU, ExpertKind
from moeflow.kernels.cpu.stages import MoEStage
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.norm import PostNorms, add_norm
from moeflow.kernels.on_demand import torch
from moeflow.kernels.routing import Routing
from moeflow.models.layers.expert_stage import expert_stage
from moeflow.models.layers.expert_weights import Destination, ExpertWeights, MovableExperts, MovedExperts
from moeflow.models.layers.linear import Linear, output_linear
from moeflow.models.layers.norm import Norm
from moeflow.models.layers.weight_allocator import ExpertShape, WeightAllocator

if TYPE_CHECKING:
    from torch import Tensor


class NetworkNames(msgspec.Struct, frozen=True):
    """How a family's checkpoints name the matrices, below the layer."""

    block: str = "mlp"
    ups: tuple[str, ...] = ("gate_proj", "up_proj")  # without a gate one
    down: str = "down_proj"

    def of_matrices(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return the whole names of the gate's and up's matrices, and of down's, in the layer `prefix`."""
        ups, downs = ([f"{prefix}.{self.block}.{name}.weight" for name in part] for part in (self.ups, [self.down]))
        return ups, downs


NAMES: Final = NetworkNames()


class MLP:
    """`down(function(gate(x)) * up(x))`, gate and up in one product; or without a gate `down(function(up(x)))`."""

    on_route: Final = None  # there is no router
    given: Final = None  # likewise

    def __init__(
        self,
        allocator: WeightAllocator,
        hidden_size: int,
        intermediate_size: int,
        kind: ExpertKind,
        names: NetworkNames,
        *,
        bias: bool = False,
    ) -> None:
        self._kind, self._names, self._block = kind, names, names.block
        gate_up = dict.fromkeys(names.ups, intermediate_size)
        self._units = allocator.units(intermediate_size)
        own = None if self._units is None else dict.fromkeys(gate_up, self._units.own)
        self.gate_up_proj = Linear(allocator, hidden_size, gate_up, bias=bias, own=own)
        self._gathers_units = self._units is not None and allocator.sums is None
        self.down_proj = output_linear(
            allocator,
            intermediate_size,
            names.down,
            hidden_size,
            bias=bias,
            own=None if self._units is None else self._units.own,
        )

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the network's result plus the residual. Shapes: hidden and residual [T, H] -> [T, H]."""
        return self.down_proj(self.units(hidden), residual)

    def and_norm(self, hidden: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the network's result plus the residual, and that normalised. Shapes: [T, H] all."""
        return add_norm(self.down_proj(self.units(hidden)), residual, norm.weights)

    def weighted(self, hidden: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """Return each token's result, times its weight, plus the residual. Shapes: weights [T, 1] float32."""
        result = self.down_proj(self.units(hidden)) * weights.to(hidden.dtype)
        return result if residual is None else result.add_(residual)

    def units(self, hidden: Tensor) -> Tensor:
        """Return what meets the last matrix, or this rank's share of it. Shapes: hidden [T, H] -> [T, I]."""
        gate_up = self.gate_up_proj(hidden)
        if self._units is not None and self._gathers_units:  # before SiLU: torch may round otherwise in narrower rows
            halves = gate_up.chunk(self._kind.num_matrices - 1, dim=1)
            gate_up = torch.cat([self._units.gather(half) for half in halves], dim=1)
        return activate(self._kind.function, gate_up, is_gated=self._kind.is_gated)

    def movable_experts(self) -> None:
        """Return nothing: these are matrices."""

    def stage(self, o_proj: Linear, norm: Norm, post_norms: PostNorms | None = None) -> None:
        """Return nothing: there is no one call for this."""

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.gate_up_proj.named_weights(f"{prefix}.{self._block}")
        yield from self.down_proj.named_weights(f"{prefix}.{self._block}")

    def matrix_names(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return the checkpoint names of the gate's and up's matrices, and of down's."""
        return self._names.of_matrices(prefix)


class FusedMLP:
    """The same as the one expert of a layer: packed, in one call, or as a slab."""

    on_route: Final = None  # there is no router
    given: Final = None  # likewise

    def __init__(self, weights: ExpertWeights, names: NetworkNames = NAMES, biases: ExpertBiases | None = None) -> None:
        """Take the weights, which know of the biases; these are to be filled here."""
        self.weights = weights
        self.biases = biases
        self._names = names

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the network's result plus the residual. Shapes: hidden and residual [T, H] -> [T, H]."""
        return self.weighted(hidden, torch.ones(hidden.shape[0], 1, device=hidden.device), residual)

    def and_norm(self, hidden: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the network's result plus the residual, and that normalised. Shapes: [T, H] all."""
        total = self(hidden, residual)
        return total, norm(total)

    def weighted(self, hidden: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """Return each token's result, times its weight, plus the residual. Shapes: weights [T, 1] float32."""
        topk_ids = torch.zeros(hidden.shape[0], 1, dtype=torch.int64, device=hidden.device)
        return self.weights.compute(hidden, topk_ids, weights, residual)

    def movable_experts(self) -> MovableExperts | None:
        """Return the weights if `with_experts` can take them from elsewhere."""
        return self.weights.movable()

    def with_experts(self, weights: MovedExperts) -> FusedMLP:
        """Return the network with weights that lie elsewhere."""
        return FusedMLP(weights, self._names, self.biases)

    def stage(self, o_proj: Linear, norm: Norm, post_norms: PostNorms | None = None) -> MoEStage | None:
        """Return one call for all that follows attention in a layer with this network; None if there is none."""
        experts = self.weights.for_kernels()
        if experts is None:
            return None
        return expert_stage(o_proj, norm, None, Routing(1), experts, post_norms=post_norms)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        (parts,) = self.weights.parts()
        assert parts is not None  # a network is never another process's alone
        for name, part in zip((*self._names.ups, self._names.down), parts, strict=True):
            yield f"{prefix}.{self._names.block}.{name}.weight", part
        if self.biases is None:
            return
        (biases,) = self.biases.parts(len(self._names.ups))
        for name, bias in zip((*self._names.ups, self._names.down), biases, strict=True):
            yield f"{prefix}.{self._names.block}.{name}.bias", bias

    def matrix_names(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return the checkpoint names of the gate's and up's matrices, and of down's."""
        return self._names.of_matrices(prefix)


def dense_mlp(
    allocator: WeightAllocator,
    hidden_size: int,
    intermediate_size: int,
    kind: ExpertKind = SWIGLU,
    names: NetworkNames = NAMES,
    *,
    bias: bool = False,
) -> MLP | FusedMLP:
    """Return the network in the form that suits where its weights are."""
    if not allocator.has_networks:
        return MLP(allocator, hidden_size, intermediate_size, kind, names, bias=bias)
    shape = ExpertShape(1, hidden_size, intermediate_size, kind)
    biases = allocator.expert_biases(shape) if bias else None
    return FusedMLP(allocator.network(shape, biases), names, biases)
