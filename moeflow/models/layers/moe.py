"""The Mixture-of-Experts feed-forward block: a router and its experts.

The family defines how a router's scores become a choice (a function in the model file), and the checkpoint names. The
experts are one shared layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import msgspec

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.activation import ClampedSwiglu
from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu.packed_experts import ExpertKind
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.cpu.stages import MoEStage
from moeflow.kernels.linear import linear
from moeflow.kernels.norm import ExpertNorms, PostNorms
from moeflow.kernels.routing import Routing
from moeflow.models.layers.expert_stage import expert_stage
from moeflow.models.layers.expert_weights import Destination, ExpertTensors, MovableExperts, MovedExperts
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.norm import Norm
from moeflow.models.layers.rearranged import cut
from moeflow.models.layers.shared_network import SHARED_NAMES, SharedNames, SharedNetwork
from moeflow.models.layers.weight_allocator import ExpertShape, WeightAllocator, whole

if TYPE_CHECKING:
    from torch import Tensor

# router logits [T, E] -> (topk_ids [T, K] int64, topk_weights [T, K] float32)
Choose = Callable[[Array], tuple[Array, Array]]
# () -> the same, of the tokens that are computed now
Given = Callable[[], tuple[Array, Array]]


class ExpertNames(msgspec.Struct, frozen=True):
    """How a family's checkpoints name the weights of the block, below the layer."""

    block: str = "mlp"
    router: str = "gate"
    expert: str = "experts.{}"
    gate: str = "gate_proj"  # empty: experts have no gate
    up: str = "up_proj"
    down: str = "down_proj"
    router_bias: str = ""  # of the router's scores; empty: there is none
    choice_bias: str = ""  # of `Routing`, one for each expert; likewise
    has_choice_bias_rows: bool = False  # whether that is a matrix of one row
    shared: SharedNames = SHARED_NAMES  # of the shared expert, if the model has one


def expert_kind(config: ModelConfig) -> ExpertKind:
    """Return what a model's experts and dense networks compute."""
    networks = config.feed_forward
    if networks.swiglu_limit is not None:
        return ExpertKind(ClampedSwiglu(networks.swiglu_alpha, networks.swiglu_limit))
    return ExpertKind(networks.hidden_act, networks.is_gated)


def num_joined(config: ModelConfig) -> int:
    """Return how many experts the shared one can be cut into; 0: it is no multiple of their width."""
    networks = config.feed_forward
    count, rest = divmod(networks.shared_intermediate_size, networks.intermediate_size)
    return 0 if rest or networks.expert_bias else count


class MoE:
    """Routes each token to `top_k` experts and adds up their results."""

    def __init__(
        self,
        config: ModelConfig,
        allocator: WeightAllocator,
        choose: Choose,
        names: ExpertNames,
        *,
        has_float32_router: bool = False,
    ) -> None:
        """`choose` gets the bias that `names` has; a router in float32 is so whatever all else is in."""
        self.config = config
        self.names = names
        self._kind = expert_kind(config)
        number, networks = config.routing.num_experts, config.feed_forward
        self.num_joined = joined = num_joined(config) if allocator.joins_shared else 0
        shape = ExpertShape(number + joined, config.hidden_size, networks.intermediate_size, self._kind)
        has_gate = joined > 0 and bool(names.shared.gate)
        self.router = allocator.router(number + has_gate, config.hidden_size, is_float32=has_float32_router)
        self.router_bias = allocator.router_bias(number, is_float32=has_float32_router) if names.router_bias else None
        self.choice_bias = allocator.empty_float32(number) if names.choice_bias else None
        self.choose = choose
        if self.choice_bias is not None:
            assert isinstance(choose, Routing)
            self.choose = replace(choose, choice_bias=self.choice_bias)
        if joined:
            assert isinstance(self.choose, Routing)
            self.choose = replace(self.choose, num_shared=joined, has_shared_gate=has_gate)
        self.biases = allocator.expert_biases(shape) if networks.expert_bias else None
        self.weights = allocator.experts(shape, self.biases)
        self.shared: SharedNetwork | None = None
        if networks.shared_intermediate_size and not joined:
            self.shared = SharedNetwork(config, allocator, self._kind, names.shared)
        self.on_route, self._capacity = allocator.on_route, allocator.capacity
        self.given: Given | None = None  # what chooses in the router's place; None: the router does

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the block's result plus the residual. Shapes: hidden and residual [T, H] -> [T, H]."""
        residual = self.with_shared(hidden, residual)
        return self.weights.compute(hidden, *self._chosen(hidden), residual)

    def and_norm(self, hidden: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the block's result plus the residual, and that normalised. Shapes: [T, H] all."""
        residual = self.with_shared(hidden, residual)
        chosen, weights = self._chosen(hidden), self.weights
        if isinstance(weights, ExpertTensors):
            return weights.compute_and_norm(hidden, *chosen, residual, norm.weights)
        total = weights.compute(hidden, *chosen, residual)
        return total, norm(total)

    def _chosen(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Do as `routed`, and drop choices beyond experts' capacity."""
        topk_ids, topk_weights = self.routed(hidden)
        if self._capacity is not None:
            topk_weights = self._capacity.limit(topk_ids, topk_weights, self.config.routing.num_experts)
        return topk_ids, topk_weights

    @overload
    def with_shared(self, hidden: Tensor, residual: Tensor) -> Tensor: ...

    @overload
    def with_shared(self, hidden: Tensor, residual: Tensor | None) -> Tensor | None: ...

    def with_shared(self, hidden: Tensor, residual: Tensor | None) -> Tensor | None:
        """Return what the chosen experts are to be added to. Shapes: hidden and residual [T, H] -> [T, H]."""
        return residual if self.shared is None else self.shared(hidden, residual)

    def network_input(self, hidden: Tensor) -> Tensor:
        """Return what the shared expert gets. Shapes: hidden [T, H] -> [T, H]."""
        return hidden

    def expert_input(self, hidden: Tensor) -> Tensor:
        """Return what the chosen experts get. Shapes: hidden [T, H] -> [T, H]."""
        return hidden

    def joined(self, shared: Tensor | None, chosen: Tensor) -> Tensor:
        """Return the block's result from what the shared expert and the chosen ones have returned, [T, H] each."""
        return chosen if shared is None else shared + chosen

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return topk_ids [T, K] int64 and topk_weights [T, K] float32. Shapes: hidden [T, H]."""
        return self.choose(self.router_logits(hidden)) if self.given is None else self.given()

    def routed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Do as `route` for tokens of a pass, and report the choice to `on_route`, which may change between passes."""
        topk_ids, topk_weights = self.route(hidden)
        if self.on_route is not None:
            self.on_route(topk_ids[:, : topk_ids.shape[1] - self.num_joined], hidden)
        return topk_ids, topk_weights

    def router_logits(self, hidden: Tensor) -> Tensor:
        """Return what the router says of each expert. Shapes: hidden [T, H] -> [T, E]."""
        return linear(hidden, self.router, self.router_bias)

    def movable_experts(self) -> MovableExperts | None:
        """Return the experts if `with_experts` can take them from elsewhere."""
        return self.weights.movable()

    def with_experts(self, weights: MovedExperts) -> MoE:
        """Return this block, its router too, with experts that lie elsewhere."""
        block = copy.copy(self)
        block.weights = weights
        return block

    def expert_norms(self) -> ExpertNorms | None:
        """Return norms that the shared expert and the chosen ones have of their own."""
        return None

    def stage(self, o_proj: Linear, norm: Norm, post_norms: PostNorms | None = None) -> MoEStage | None:
        """Return one call for all that follows attention in a layer with this block; None if there is none."""
        router, choose, experts = self.router, self.choose, self.weights.for_kernels()
        if experts is None or not (isinstance(router, PackedWeight) and isinstance(choose, Routing)):
            return None
        shared = None if self.shared is None else self.shared.for_kernels()
        if self.shared is not None and shared is None:
            return None
        if post_norms is not None:
            post_norms = post_norms._replace(experts=self.expert_norms())
        stage = expert_stage(o_proj, norm, router, choose, experts, self.router_bias, shared, post_norms)
        return stage if stage is None or self._capacity is None else replace(stage, capacity=self._capacity)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination); experts that others fill, or have, are left out."""
        names, choice_bias, number = self.names, self.choice_bias, self.config.routing.num_experts
        parts = self.weights.parts()
        if parts[number:]:
            yield from self._joined_weights(prefix, parts[number:])
        else:
            yield self.router_name(prefix), whole(self.router)
        if self.router_bias is not None:
            yield f"{prefix}.{names.block}.{names.router_bias}", self.router_bias
        if choice_bias is not None:
            bias = choice_bias.reshape(1, -1) if names.has_choice_bias_rows else choice_bias
            yield f"{prefix}.{names.block}.{names.choice_bias}", bias
        if self.shared is not None:
            yield from self.shared.named_weights(prefix)
        for expert, matrices in enumerate(parts[:number]):
            if matrices is not None:
                yield from zip(self.expert_names(prefix, expert), matrices, strict=True)
        if self.biases is None:
            return
        for expert, biases in enumerate(self.biases.parts(self._kind.num_ups)):
            yield from zip(self.expert_names(prefix, expert, "bias"), biases, strict=True)

    def _joined_weights(self, prefix: str, experts: Sequence[Any]) -> Iterator[tuple[str, Destination]]:
        """Yield the same of the router, and of experts that are parts of the shared one."""
        number, shared, router = self.config.routing.num_experts, self.names.shared, self.router
        assert not isinstance(router, PackedWeight), "only tensors are rearranged"
        yield self.router_name(prefix), router[:number]
        if shared.gate:
            yield f"{prefix}.{shared.gate}.weight", router[number:]
        ups, downs = shared.network.of_matrices(prefix)
        for name, places in zip([*ups, *downs], zip(*experts, strict=True), strict=True):
            yield name, cut(places, dim=1 if name in downs else 0)

    def matrix_names(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return the checkpoint names of all experts' gates and ups, and of their downs."""
        names = [self.expert_names(prefix, expert) for expert in range(self.config.routing.num_experts)]
        return [name for ups in names for name in ups[:-1]], [name for *_, name in names]

    def shared_matrix_names(self, prefix: str) -> dict[str, list[str]]:
        """Return the same of the shared expert, by the fields of `LayerFormats`; empty if there is none."""
        if self.shared is None:
            return {}
        ups, downs = self.shared.matrix_names(prefix)
        return {"shared_up": ups, "shared_down": downs}

    def names_of_routers(self, prefix: str) -> list[str]:
        """Return the checkpoint names of all that is kept as routers are."""
        gates = [] if self.shared is None else self.shared.gate_names(prefix)
        return [self.router_name(prefix), *gates]

    def router_name(self, prefix: str) -> str:
        """Return the checkpoint name of the router's matrix."""
        return f"{prefix}.{self.names.block}.{self.names.router}.weight"

    def expert_names(self, prefix: str, expert: int, kind: str = "weight") -> list[str]:
        """Return the checkpoint names of an expert's gate, if it has one, up and down matrices, or of their biases."""
        names = self.names
        place = f"{prefix}.{names.block}.{names.expert.format(expert)}"
        return [f"{place}.{matrix}.{kind}" for matrix in (names.gate, names.up, names.down) if matrix]
