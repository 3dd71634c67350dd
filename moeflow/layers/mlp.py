"""The dense feed-forward network (SwiGLU)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from moeflow.kernels.activation import silu_and_mul
from moeflow.layers.linear import Linear
from moeflow.layers.placement import Placement


class MLP:
    """`down(silu(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(self, place: Placement, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        gate_up = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(place, hidden_size, gate_up, bias=bias)
        self.down_proj = Linear(place, intermediate_size, {"down_proj": hidden_size}, bias=bias)

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the network's result plus the residual. Shapes: hidden and residual [T, H] -> [T, H]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)), residual)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, destination)."""
        yield from self.gate_up_proj.named_weights(f"{prefix}.mlp")
        yield from self.down_proj.named_weights(f"{prefix}.mlp")
