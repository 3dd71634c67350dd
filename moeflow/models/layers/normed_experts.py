"""Experts beside a network that all tokens go to, where each has norms of its own, before and behind it.

Hidden states are normalised once, without weights: the network, the experts and the router then multiply them by
weights of their own. So a router run ahead gets the same input as any other layer's router.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.norm import ExpertNorms, NormWeights, PostNorms
from moeflow.kernels.normed_experts import expert_inputs, normed_experts
from moeflow.kernels.routing import Routing
from moeflow.models.layers.expert_weights import Destination, ExpertTensors
from moeflow.models.layers.moe import ExpertNames, MoE
from moeflow.models.layers.norm import Norm
from moeflow.models.layers.weight_allocator import WeightAllocator

if TYPE_CHECKING:
    from torch import Tensor


class NormedExperts(MoE):
    """Returns `norm(network(a x)) + norm(experts(b x))`, where the router chooses by `c x`."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, choose: Routing, names: ExpertNames) -> None:
        scales = allocator.empty_float32(config.routing.num_experts)
        super().__init__(config, allocator, replace(choose, expert_scales=scales), names)
        self._choice_weights, size = scales, config.hidden_size
        self._network_weights, self._expert_weights = allocator.empty(size), allocator.empty(size)  # a and b
        self._router_weights, self._router_scale = allocator.empty(size), size**-0.5  # c is their product
        self._network_norm, self._experts_norm = Norm.of(config, allocator), Norm.of(config, allocator)

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `MoE`: nothing is added. Shapes: hidden [T, H] -> [T, H]."""
        assert residual is None, "the sum is normalised before it is added"
        assert self.shared is not None, "there is no network"
        shared = self.shared(self.network_input(hidden), None)
        topk_ids, topk_weights = self._chosen(hidden)
        return self.joined(shared, self.weights.compute(self.expert_input(hidden), topk_ids, topk_weights))

    def finish_layer(
        self, x: Tensor, hidden: Tensor, plain: NormWeights, norms: PostNorms, next_norm: NormWeights
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's result for what attention adds, x, and that normalised, where the network is joined.

        `plain` is a norm without weights. Shapes: [T, H] all.
        """
        weights = self.weights
        assert isinstance(weights, ExpertTensors), "only tensors are rearranged"
        norms = norms._replace(experts=self.expert_norms())
        hidden, inputs = expert_inputs(x, hidden, plain, norms)
        chosen = self.choose(super().router_logits(inputs[2]))
        if self.on_route is not None:
            self.on_route(chosen[0][:, : self.config.routing.top_k], None)
        return normed_experts(
            inputs[:2],
            (weights.gate_up, weights.down),
            chosen,
            self.num_joined,
            hidden,
            norms,
            function=weights.kind.function,
            next_norm=next_norm,
        )

    def network_input(self, hidden: Tensor) -> Tensor:
        """See `MoE`. Shapes: hidden [T, H] -> [T, H]."""
        return hidden * self._network_weights

    def expert_input(self, hidden: Tensor) -> Tensor:
        """See `MoE`. Shapes: hidden [T, H] -> [T, H]."""
        return hidden * self._expert_weights

    def joined(self, shared: Tensor | None, chosen: Tensor) -> Tensor:
        """See `MoE`. Shapes: [T, H] all."""
        assert shared is not None, "there is no network"
        return self._experts_norm.add(self._network_norm(shared), chosen)

    def router_logits(self, hidden: Tensor) -> Tensor:
        """See `MoE`. Shapes: hidden [T, H] -> [T, E]."""
        return super().router_logits(hidden * self._router_scale * self._router_weights)

    def expert_norms(self) -> ExpertNorms:
        """See `MoE`."""
        return ExpertNorms(
            self._router_weights,
            self._router_scale,
            self._network_weights,
            self._expert_weights,
            self._network_norm.weights,
            self._experts_norm.weights,
        )

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from super().named_weights(prefix)
        router = f"{prefix}.{self.names.block}.router"
        yield f"{router}.scale", self._router_weights
        yield f"{router}.per_expert_scale", self._choice_weights
        yield f"{prefix}.pre_feedforward_layernorm.weight", self._network_weights
        yield f"{prefix}.pre_feedforward_layernorm_2.weight", self._expert_weights
        yield from self._network_norm.named_weights(f"{prefix}.post_feedforward_layernorm_1")
        yield from self._experts_norm.named_weights(f"{prefix}.post_feedforward_layernorm_2")
