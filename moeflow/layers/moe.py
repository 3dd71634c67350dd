"""The Mixture-of-Experts feed-forward block: a router and its experts.

How a router's scores become a choice is the family's business (a function from the model file), and so are the
checkpoint names; the experts are one shared layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.experts import fused_experts
from moeflow.kernels.linear import linear
from moeflow.layers.placement import Placement

# router logits [T, E] -> (topk_ids [T, K] int64, topk_weights [T, K] float32)
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family's checkpoints name the weights of the block, below the layer."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class MoE:
    """Routes each token to `top_k` experts and adds up what they return."""

    def __init__(self, config: ModelConfig, place: Placement, choose: Choose, names: ExpertNames) -> None:
        self.config = config
        self.choose = choose
        self.names = names
        self.router = place.empty(config.num_experts, config.hidden_size)
        self.gate_up = place.empty(config.num_experts, 2 * config.intermediate_size, config.hidden_size)
        self.down = place.empty(config.num_experts, config.hidden_size, config.intermediate_size)

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the block's result plus the residual. Shapes: hidden and residual [T, H] -> [T, H]."""
        return self.experts(hidden, *self.route(hidden), residual)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return topk_ids [T, K] int64 and topk_weights [T, K] float32. Shapes: hidden [T, H]."""
        return self.choose(linear(hidden, self.router))

    def experts(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's experts plus the residual. Shapes: hidden [T, H] -> [T, H]."""
        out = fused_experts(hidden, self.gate_up, self.down, topk_ids, topk_weights)
        return out if residual is None else out.add_(residual)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, destination)."""
        block = f"{prefix}.{self.names.block}"
        yield f"{block}.gate.weight", self.router
        for expert in range(self.config.num_experts):
            gate, up = self.gate_up[expert].chunk(2)
            yield f"{block}.experts.{expert}.{self.names.gate}.weight", gate
            yield f"{block}.experts.{expert}.{self.names.up}.weight", up
            yield f"{block}.experts.{expert}.{self.names.down}.weight", self.down[expert]
