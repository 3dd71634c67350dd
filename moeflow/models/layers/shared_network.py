"""The shared expert: a network for every token, in addition to the experts chosen by a router.

It comes before the chosen ones in the sum that a layer adds to the hidden states. So it is part of the sum that experts
are added to, wherever they are. It is computed while experts are read from disk. It is always in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.cpu.packed_experts import ExpertKind
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.cpu.stages import SharedExpert
from moeflow.kernels.linear import linear
from moeflow.kernels.routing import Routing
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.mlp import MLP, FusedMLP, NetworkNames
from moeflow.models.layers.weight_allocator import ExpertShape, Weight, WeightAllocator, whole

if TYPE_CHECKING:
    from torch import Tensor

_GATE: Final = Routing(1, score="sigmoid")  # of one, which then weighs the sigmoid of its score


class SharedNames(msgspec.Struct, frozen=True):
    """How a family's checkpoints name the weights, below the layer."""

    network: NetworkNames
    gate: str = ""  # of what a token's result weighs; empty: it weighs 1


SHARED_NAMES: Final = SharedNames(NetworkNames(block="mlp.shared_experts"))


class SharedNetwork:
    """The network, and the gate that weighs its results, if there is one."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, kind: ExpertKind, names: SharedNames) -> None:
        size = (config.hidden_size, config.feed_forward.shared_intermediate_size)
        packed = allocator.shared_network(ExpertShape(1, *size, kind))
        self.network: MLP | FusedMLP = (
            MLP(allocator.for_shared(), *size, kind, names.network)
            if packed is None
            else FusedMLP(packed, names.network)
        )
        self.gate: Weight | None = allocator.router(1, config.hidden_size) if names.gate else None
        self._names = names

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """Return the network's result plus the residual. Shapes: hidden and residual [T, H] -> [T, H]."""
        if self.gate is None:
            return self.network(hidden, residual)
        scores = linear(hidden if isinstance(self.gate, PackedWeight) else hidden.to(self.gate.dtype), self.gate)
        _, weights = _GATE(scores)
        return self.network.weighted(hidden, weights, residual)

    def for_kernels(self) -> SharedExpert | None:
        """Return the weights that the CPU kernels read; None if they cannot compute with these."""
        experts = self.network.weights.for_kernels() if isinstance(self.network, FusedMLP) else None
        if experts is None:
            return None
        return SharedExpert(experts[0], self.gate if isinstance(self.gate, PackedWeight) else None)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.network.named_weights(prefix)
        if self.gate is not None:
            yield f"{prefix}.{self._names.gate}.weight", whole(self.gate)

    def matrix_names(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return the checkpoint names of the gate's and up's matrices, and of down's."""
        return self.network.matrix_names(prefix)

    def gate_names(self, prefix: str) -> list[str]:
        """Return the checkpoint names of tensors kept in the routers' dtype."""
        return [f"{prefix}.{self._names.gate}.weight"] if self.gate is not None else []
