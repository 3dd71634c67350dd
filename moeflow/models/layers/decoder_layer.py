"""One decoder layer in three stages, so that a pipeline can run each where and when it wants."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.cpu.packed_layer import PackedLayer
from moeflow.kernels.cpu.packed_weight import PackedStack, PackedWeight
from moeflow.kernels.cpu.stages import MoEStage
from moeflow.kernels.norm import PostNorms, add_norm, add_normalised_norm
from moeflow.kernels.on_demand import on_demand
from moeflow.kernels.rotary import RotaryTable
from moeflow.kernels.triton import launching
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.divided_experts import RoutedTokens
from moeflow.models.layers.expert_weights import Destination, MovableExperts, MovedExperts
from moeflow.models.layers.latent_attention import LatentAttention
from moeflow.models.layers.layer_embeddings import LayerInput
from moeflow.models.layers.linear import SummedLinear
from moeflow.models.layers.mlp import MLP, FusedMLP
from moeflow.models.layers.moe import MoE
from moeflow.models.layers.norm import Norm
from moeflow.models.layers.token_mixer import TokenMixer
from moeflow.models.layers.weight_allocator import WeightAllocator

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.models.layers import normed_experts


@dataclass(frozen=True, slots=True)
class LayerNames:
    """How a family's checkpoints name what a layer has beside its network."""

    mixer: str = "self_attn"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"


class DecoderLayer:
    """Attention or another mixer of tokens, then feed-forward network, each normalised before and added to what came
    in.
    """

    def __init__(
        self,
        config: ModelConfig,
        allocator: WeightAllocator,
        mixer: TokenMixer,
        mlp: MLP | FusedMLP | MoE,
        names: LayerNames = LayerNames(),  # frozen
        layer_input: LayerInput | None = None,
    ) -> None:
        """`layer_input` is the last part, with the layer's scale."""
        self.mixer = mixer
        self.mlp = mlp
        self._layer_input = layer_input
        self._names = names
        self.input_layernorm = Norm.of(config, allocator)
        self._has_own_norms = config.norms.has_norms_of_experts and isinstance(mlp, MoE)
        # Before the feed-forward network.
        self.post_attention_layernorm = Norm.of(config, allocator, has_weight=not self._has_own_norms)
        has_post_norms = config.norms.has_post_norms
        self._post_norms = (Norm.of(config, allocator), Norm.of(config, allocator)) if has_post_norms else None
        self._scale = allocator.empty(1) if config.norms.has_layer_scales and layer_input is None else None
        self._stage = self._make_stage()

    def __call__(self, hidden: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """Shapes: hidden [T, H] -> [T, H]."""
        return self.run(hidden, None, self.input_layernorm, rotary, context)[0]

    def run(
        self,
        hidden: Tensor,
        normed: Tensor | None,
        next_norm: Norm,
        rotary: Sequence[RotaryTable],
        context: ForwardContext,
        on_mixed: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result, and that normalised as the next layer needs it, if this takes no launch of its own.

        `normed` are the normalised hidden states, if they are there. `on_mixed` is called after attention, before its
        output projection. Shapes: [T, H] all.
        """
        qkv = self.pre_attention(hidden) if normed is None else self.mixer.in_proj(normed)
        attended = self.attention(qkv, rotary, context)
        if on_mixed is not None:
            on_mixed()
        if self._has_own_norms and isinstance(self.mlp, normed_experts.NormedExperts) and self.mlp.num_joined:
            return self.mlp.finish_layer(
                self.mixer.out_proj(attended),
                hidden,
                self.post_attention_layernorm.weights,
                self._norms_of_results(),
                next_norm.weights,
            )
        if self._layer_input is None and launching.accepts(attended):
            hidden, normed = self._network_input(hidden, attended)
            if self._post_norms is None:
                return self.mlp.and_norm(normed, hidden, next_norm)
            own, result = self._post_norms[1], self.mlp(normed)
            return add_normalised_norm(hidden, result, own.weights, next_norm.weights, self._scale)
        return self._after(hidden, attended, context), None

    def _after(self, hidden: Tensor, attended: Tensor, context: ForwardContext) -> Tensor:
        """Return the layer's result, given what attention returns. Shapes: as `post_attention`."""
        hidden = self.post_attention(hidden, attended)
        if self._layer_input is None:
            return hidden
        assert context.layer_inputs is not None, "nothing is said of what layers get besides"
        return self._layer_input(hidden, context.layer_inputs)

    @property
    def self_attn(self) -> Attention | LatentAttention:
        """The attention of a layer that has it."""
        assert isinstance(self.mixer, Attention | LatentAttention), "a recurrent layer"
        return self.mixer

    @property
    def movable_experts(self) -> MovableExperts | None:
        """The experts, or the dense network as one; None if `with_experts` cannot take them from elsewhere."""
        return self.mlp.movable_experts()

    def with_experts(self, weights: MovedExperts) -> DecoderLayer:
        """Return this layer with experts that lie elsewhere; all else is shared."""
        assert not isinstance(self.mlp, MLP)
        layer = copy.copy(self)
        layer.mlp = self.mlp.with_experts(weights)
        layer._stage = layer._make_stage()
        return layer

    def packed(self) -> PackedLayer | None:
        """Return the layer for `PackedDecoder`; None if it has to be run stage by stage."""
        projection, mixer = self.mixer.in_proj, self.mixer.for_kernels()
        weight = projection.weight
        if self._stage is None or mixer is None or not isinstance(weight, PackedWeight | PackedStack):
            return None
        layer_input = None if self._layer_input is None else self._layer_input.packed
        assert self._layer_input is None or layer_input is not None, "some weights are packed, and some are not"
        return PackedLayer(
            in_proj=weight.parts if isinstance(weight, PackedStack) else (weight,),
            in_bias=projection.bias,
            input_norm=self.input_layernorm.weights,
            mixer=mixer,
            stage=self._stage,
            order=self.mixer.order,
            layer_input=layer_input,
        )

    def pre_attention(self, hidden: Tensor) -> Tensor:
        """Return queries, keys and values in one row, or their latents, or another mixer's inputs.

        Shapes: hidden [T, H] -> [T, ..].
        """
        return self.mixer.in_proj.after_norm(hidden, self.input_layernorm)

    def attention(self, qkv: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """Store keys and values in the cache and attend; qkv is used up. Shapes: as above -> [T, Q * D]."""
        return self.mixer.mix(qkv, rotary, context)

    def post_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Shapes: hidden [T, H] as it came into the layer, attended [T, Q * D] -> [T, H]."""
        stage = self._stage
        if stage is not None and stage.slots is None and self.mlp.on_route is None and self.mlp.given is None:
            return stage(hidden, attended)
        hidden, normed = self._network_input(hidden, attended)
        if self._post_norms is None:
            return self.mlp(normed, residual=hidden)
        return self.add_network(hidden, self.mlp(normed))

    def _network_input(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states plus what attention gives, and that normalised. Shapes: as `post_attention`."""
        norm = self.post_attention_layernorm.weights
        if launching.accepts(attended):
            added = self.mixer.out_proj(attended)
            if self._post_norms is None:
                return add_norm(added, hidden, norm)
            return add_normalised_norm(hidden, added, self._post_norms[0].weights, norm)
        hidden = self.after_attention(hidden, attended)
        return hidden, self.post_attention_layernorm(hidden)

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return hidden states plus what attention gives. Shapes: as `post_attention`."""
        out_proj = self.mixer.out_proj
        if self._post_norms is None:
            return out_proj(attended, residual=hidden)
        return self._post_norms[0].add(hidden, out_proj(attended))

    def part_of_attention(self, attended: Tensor) -> Tensor:
        """Return this device's part of what attention gives. Shapes: attended [T, own Q * D] -> [T, H]."""
        out_proj = self.mixer.out_proj
        assert isinstance(out_proj, SummedLinear), "devices share the layer"
        return out_proj.part(attended)

    def add_attention(self, hidden: Tensor, summed: Tensor) -> Tensor:
        """Return hidden states plus what attention gives, from the sum of all devices' parts. Shapes: [T, H] all."""
        out_proj = self.mixer.out_proj
        assert isinstance(out_proj, SummedLinear), "devices share the layer"
        if self._post_norms is None:
            return out_proj.finished(summed, hidden)
        return self._post_norms[0].add(hidden, out_proj.finished(summed))

    def part_of_network(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual of the network, and this device's part of its result. Shapes: [T, H] all."""
        normed, mlp = self.post_attention_layernorm(hidden), self.mlp
        if not isinstance(mlp, MoE):
            return hidden, mlp(normed)
        part = mlp.weights.compute(mlp.expert_input(normed), *mlp.routed(normed))
        return hidden if self.has_post_norms else mlp.with_shared(normed, hidden), part

    def add_network_sum(self, residual: Tensor, summed: Tensor) -> Tensor:
        """Finish a layer with the sum of all devices' parts. Shapes: [T, H] all."""
        if not isinstance(self.mlp, MoE):
            return self.add_network(residual, summed)
        return self.add_divided(lambda onto: summed if onto is None else summed + onto, residual)

    def add_network(self, hidden: Tensor, result: Tensor) -> Tensor:
        """Return hidden states plus what the feed-forward network has returned, scaled. Shapes: [T, H] all."""
        return hidden + result if self._post_norms is None else self._post_norms[1].add(hidden, result, self._scale)

    def add_chosen(self, normed: Tensor, topk_ids: Tensor, topk_weights: Tensor, hidden: Tensor) -> Tensor:
        """Finish a layer that was run as far as its router, with experts that the kernels could not do with.

        `hidden` has the shared expert's result already, unless that is normalised by itself: then it is computed again.
        Shapes: normed and hidden [T, H], topk_ids and topk_weights [T, K] -> [T, H].
        """
        mlp = self.mlp
        assert isinstance(mlp, MoE)
        if self._post_norms is None:
            return mlp.weights.compute(normed, topk_ids, topk_weights, hidden)
        return self.add_normed(normed, mlp.weights.compute(mlp.expert_input(normed), topk_ids, topk_weights), hidden)

    def add_normed(self, normed: Tensor, chosen: Tensor, hidden: Tensor) -> Tensor:
        """Finish a layer that normalizes its sums, with the result of the chosen experts. Shapes: [T, H] all."""
        mlp = self.mlp
        assert isinstance(mlp, MoE)
        shared = None if mlp.shared is None else mlp.shared(mlp.network_input(normed), None)
        return self.add_network(hidden, mlp.joined(shared, chosen))

    @property
    def has_post_norms(self) -> bool:
        """Whether what attention and networks return is normalised before it is added."""
        return self._post_norms is not None

    @property
    def has_router(self) -> bool:
        """Whether it has experts to choose from."""
        return isinstance(self.mlp, MoE)

    def route(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, RoutedTokens]:
        """Return the residual of experts, [T, H], and their inputs. Shapes: as `post_attention`.

        The shared expert's result is added already, unless that is normalised before.
        """
        mlp = self.mlp
        assert isinstance(mlp, MoE)
        hidden, normed = self._network_input(hidden, attended)
        routed = RoutedTokens(mlp.expert_input(normed), *mlp.routed(normed))
        return hidden if self.has_post_norms else mlp.with_shared(normed, hidden), routed

    def add_divided(self, sums: Callable[[Tensor | None], Tensor], hidden: Tensor) -> Tensor:
        """Finish a layer after `route`; `sums` adds up the chosen experts' results, onto a given tensor if there is
        one.

        Shapes: hidden [T, H] -> [T, H].
        """
        if not self.has_post_norms:
            return sums(hidden)
        return self.add_normed(self.post_attention_layernorm(hidden), sums(None), hidden)

    def matrix_names(self, prefix: str) -> dict[str, list[str]]:
        """Return the checkpoint names of the matrices that each field of `LayerFormats` is about."""
        ups, downs = self.mlp.matrix_names(prefix)
        shared = self.mlp.shared_matrix_names(prefix) if isinstance(self.mlp, MoE) else {}
        mixer = self.mixer.matrix_names(f"{prefix}.{self._names.mixer}")
        inputs = {} if self._layer_input is None else self._layer_input.matrix_names(prefix)
        return mixer | {"up": ups, "down": downs} | shared | inputs

    def _make_stage(self) -> MoEStage | None:
        out_proj, norm = self.mixer.out_proj, self.post_attention_layernorm
        if self._post_norms is None:
            assert self._scale is None, "layers are scaled where what they add is normalised"
            return self.mlp.stage(out_proj, norm)
        return self.mlp.stage(out_proj, norm, self._norms_of_results())

    def _norms_of_results(self) -> PostNorms:
        assert self._post_norms is not None, "results are added as they are"
        after_attention, after_network = (it.weights for it in self._post_norms)
        return PostNorms(after_attention, after_network, scale=self._scale)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        names = self._names
        yield from self.mixer.named_weights(f"{prefix}.{names.mixer}")
        yield from self.mlp.named_weights(prefix)
        yield from self.input_layernorm.named_weights(f"{prefix}.{names.input_norm}")
        if self._layer_input is not None:
            yield from self._layer_input.named_weights(prefix)
        if self._scale is not None:
            yield f"{prefix}.layer_scalar", self._scale
        if self._post_norms is None:
            yield from self.post_attention_layernorm.named_weights(f"{prefix}.{names.post_norm}")
            return
        yield from self.post_attention_layernorm.named_weights(f"{prefix}.pre_feedforward_layernorm")
        for part, norm in zip(("attention", "feedforward"), self._post_norms, strict=True):
            yield from norm.named_weights(f"{prefix}.post_{part}_layernorm")
