"""A decoder-only language model: embedding, layers, final norm, output projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.arrays import Array, floats, is_numpy
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.embedding import embedding
from moeflow.kernels.linear import linear
from moeflow.kernels.on_demand import without_gradients
from moeflow.kernels.scaling import scaled, soft_cap
from moeflow.kernels.triton.planar_weights import PlanarWeights
from moeflow.models.layers.added_positions import PositionTable
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.layer_embeddings import TABLE_NAME, LayerEmbedding
from moeflow.models.layers.moe import Given, MoE
from moeflow.models.layers.norm import Norm
from moeflow.models.layers.packed_layers import PackedLayers
from moeflow.models.layers.rotary import RotaryEmbeddings
from moeflow.models.layers.weight_allocator import HeadWeight, WeightAllocator, own_rows_of, rows_of, whole

if TYPE_CHECKING:
    from moeflow.pipeline.runtime.layer_times import LayerStamp, LayerTimes

MakeLayer = Callable[[ModelConfig, WeightAllocator, int], DecoderLayer]  # the last is the layer's number


class CausalLM:
    """What the model files build. Weights are uninitialised until a loader fills `named_weights`.

    Of a model that is cut into stages it is one stage: some of the layers, and in the first all that is no layer.
    """

    # Of tensors, as far as there are such.
    embedding_names: Final = ("model.embed_tokens.weight", "lm_head.weight", TABLE_NAME)
    copies: Final[Mapping[str, str]] = {}  # see `EncoderDecoderLM`

    def __init__(
        self,
        config: ModelConfig,
        allocator: WeightAllocator,
        make_layer: MakeLayer,
        *,
        last_norm: str = "model.norm",
    ) -> None:
        """`last_norm` is what checkpoints call the final norm."""
        self.config = config
        self._last_norm = last_norm
        self.dtype = allocator.dtype  # of hidden states
        self.device = allocator.device
        own = allocator.own_layers or range(config.num_layers)
        elsewhere = allocator.elsewhere()
        self.first_layer = own.start
        ends = allocator if self._has_ends else elsewhere  # in the order of memory
        self.embed_tokens = ends.matrix("embeddings", config.vocab_size, config.hidden_size)
        added = config.embeddings.added_positions
        self.embed_positions = None if added is None else PositionTable(added, config.hidden_size, ends)
        sizes = config.embeddings.layer_embeddings
        self.embed_layers = None if sizes is None else LayerEmbedding(config, sizes, ends)
        layers = [
            make_layer(config, (allocator if layer_idx in own else elsewhere).in_layer(layer_idx), layer_idx)
            for layer_idx in range(config.num_layers)
        ]
        self.layers = tuple(layers[own.start : own.stop])
        self.norm = Norm.of(config, ends)
        self._vocab = ends.columns("logits", config.vocab_size)
        self.lm_head = self._make_head(ends)
        has_bias = config.embeddings.lm_head_bias
        self.lm_head_bias = ends.empty(config.vocab_size) if has_bias else None  # ranks have all of it
        self.rotary = RotaryEmbeddings(config.attention.ropes, config.attention.head_dim, allocator.device)
        out_norm = self.norm.weights if len(own) == config.num_layers else None
        self._packed = PackedLayers.of(self.layers, self.rotary.kinds, out_norm, allocator)
        self._has_cached_experts = allocator.has_cached_experts
        self.layer_times: LayerTimes | None = None  # gets those of each pass; None: nobody asks

    @without_gradients
    def __call__(self, token_ids: Array, context: ForwardContext) -> Array:
        """Return the hidden states after the final norm; writes K and V of every token to `context.kv`.

        Shapes: token_ids [T] int64 -> [T, H].
        """
        hidden, context = self.begin(token_ids, context)
        if self._packed is not None and context.kv.is_for_kernels:
            normed = self._packed(hidden, context, self.layer_times).out
            assert normed is not None, "this is a stage without the last layer"
            return normed
        hidden, normed = self._run_layers(hidden, context)
        return self.norm(hidden) if normed is None else normed

    @without_gradients
    def begin(self, token_ids: Array, context: ForwardContext) -> tuple[Array, ForwardContext]:
        """Return what goes into the first layer, and the context with what layers get besides.

        Shapes: token_ids [T] int64 -> [T, H].
        """
        hidden = self.embed_at(token_ids, context.positions)
        if self.embed_layers is not None:
            context = replace(context, layer_inputs=self.embed_layers(token_ids, hidden))
        return hidden, context

    @without_gradients
    def embed(self, token_ids: Array) -> Array:
        """Return the tokens' embeddings. Shapes: token_ids [T] int64 -> [T, H]."""
        return scaled(embedding(token_ids, self.embed_tokens), self.config.embeddings.embedding_scale)

    @without_gradients
    def embed_at(self, token_ids: Array, positions: Array) -> Array:
        """Return what goes into the first layer. Shapes: token_ids and positions [T] int64 -> [T, H]."""
        hidden = self.embed(token_ids)
        return hidden if self.embed_positions is None else self.embed_positions.add(hidden, positions)

    @without_gradients
    def run_layers(self, hidden: Array, context: ForwardContext) -> Array:
        """Return the output of this rank's last layer; writes K and V of every token to `context.kv`.

        Shapes: hidden [T, H], which is used up -> [T, H].
        """
        if self._packed is not None and context.kv.is_for_kernels:
            return self._packed(hidden, context, self.layer_times).hidden
        return self._run_layers(hidden, context)[0]

    def _run_layers(self, hidden: Array, context: ForwardContext) -> tuple[Array, Array | None]:
        """Run the layers one by one, and return what the last one returns."""
        rotary = self.rotary(context.positions, hidden.dtype)
        assert not is_numpy(hidden), "layers that no kernel computes whole need torch's tensors"
        normed = None
        next_norms = (*(layer.input_layernorm for layer in self.layers[1:]), self.norm)
        for layer, next_norm, stamp in zip(self.layers, next_norms, self._stamps(len(hidden)), strict=True):
            if stamp is None:
                hidden, normed = layer.run(hidden, normed, next_norm, rotary, context)
                continue
            stamp.begin()
            hidden, normed = layer.run(hidden, normed, next_norm, rotary, context, stamp.mixed)
            if not (layer.has_router and self._has_cached_experts):  # these report their own spans
                stamp.end()
        return hidden, normed

    def _stamps(self, num_tokens: int) -> Sequence[LayerStamp | None]:
        return [None] * len(self.layers) if self.layer_times is None else self.layer_times.stamps(num_tokens)

    @without_gradients
    def logits(self, hidden: Array) -> Array:
        """Shapes: hidden [S, H] from a pass -> [S, V] float32.

        Where ranks share the head, all call this with the same rows. Raises: GroupError.
        """
        bias = self.lm_head_bias
        if bias is not None and self._vocab is not None:
            bias = bias[self._vocab.own.start : self._vocab.own.stop]
        own = floats(linear(scaled(hidden, self.config.embeddings.logit_scale), self.lm_head, bias))
        cap = self.config.embeddings.logit_soft_cap
        capped = own if cap is None else soft_cap(own, cap)
        return capped if self._vocab is None else self._vocab.gather(capped)

    def choose_by(self, given: Sequence[Given]) -> None:
        """Have something choose experts in the place of the routers, in each of `moe_blocks`."""
        for (_, block), choice in zip(self.moe_blocks(), given, strict=True):
            block.given = choice
        self._packed = None  # which asks routers

    def close(self) -> None:
        """End what the model has running: nothing."""

    def first(self, num_layers: int) -> CausalLM:
        """Return a model of the first layers alone, followed by norm and output projection; it shares all weights."""
        early = copy(self)
        early.config = replace(self.config, num_layers=num_layers)
        early.layers = self.layers[:num_layers]
        early.layer_times = None
        early._packed = None if self._packed is None else self._packed.first(num_layers)
        return early

    def drafting(self, token_ids: Sequence[int]) -> CausalLM:
        """Return a model whose logits are those of some tokens alone, in their order; it shares all other weights.

        Raises: MemoryError.
        """
        assert self._vocab is None, "ranks share the output projection"
        model = copy(self)
        if isinstance(self.lm_head, PackedWeight):
            model.lm_head = self.lm_head.take([range(token_id, token_id + 1) for token_id in token_ids])
        else:
            assert not isinstance(self.lm_head, PlanarWeights), "drafts are computed by the processor"
            model.lm_head = self.lm_head[list(token_ids)]
        if self.lm_head_bias is not None:
            model.lm_head_bias = self.lm_head_bias[list(token_ids)]
        return model

    @property
    def tells_inputs(self) -> bool:
        """Whether a pass over a cache for kernels calls `ForwardContext.on_inputs`."""
        return self._packed is not None

    @property
    def packed_layers(self) -> PackedLayers | None:
        """The layers as kernels compute them in one call; None: they run one by one."""
        return self._packed

    @property
    def shares_head(self) -> bool:
        """Whether all ranks compute parts of the logits."""
        return self._vocab is not None

    @property
    def _has_ends(self) -> bool:
        """Whether this rank has token embeddings, final norm and output projection: in the first stage."""
        return self.first_layer == 0

    def _make_head(self, allocator: WeightAllocator) -> HeadWeight:
        """Return the output projection, or of it the rows of the tokens that are this rank's."""
        config, own = self.config, None if self._vocab is None else [self._vocab.own]
        if not config.embeddings.tie_word_embeddings:
            return allocator.head(config.vocab_size, config.hidden_size, own)
        if own is None:
            return self.embed_tokens
        if isinstance(self.embed_tokens, PackedWeight):
            return self.embed_tokens.take(own)
        (rows,) = own
        return self.embed_tokens[rows.start : rows.stop]

    def moe_blocks(self) -> Iterator[tuple[str, MoE]]:
        """Yield (prefix of its checkpoint names, block) of the layers with experts."""
        for layer_idx, layer in enumerate(self.layers, self.first_layer):
            if isinstance(layer.mlp, MoE):
                yield f"model.layers.{layer_idx}", layer.mlp

    def named_weights(self) -> Iterator[tuple[str, Destination]]:
        """Yield every (checkpoint name, where its tensor goes)."""
        if self._has_ends:
            yield "model.embed_tokens.weight", whole(self.embed_tokens)
            if self.embed_positions is not None and self.embed_positions.weight is not None:
                yield "model.embed_positions.weight", self.embed_positions.weight
            if self.embed_layers is not None:
                yield from self.embed_layers.named_weights()
        for layer_idx, layer in enumerate(self.layers, self.first_layer):
            yield from layer.named_weights(f"model.layers.{layer_idx}")
        if not self._has_ends:
            return
        yield from self.norm.named_weights(self._last_norm)
        if not self.config.embeddings.tie_word_embeddings:
            if self._vocab is None:
                (rows,) = rows_of(self.lm_head, [range(self.config.vocab_size)])
            else:
                (rows,) = own_rows_of(self.lm_head, [self._vocab.own])
            yield "lm_head.weight", rows
        if self.lm_head_bias is not None:
            yield "lm_head.bias", self.lm_head_bias
