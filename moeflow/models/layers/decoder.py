"""A decoder-only language model: embedding, layers, final norm, output projection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.cpu.packed_weights import PackedWeight
from moeflow.kernels.embedding import embedding
from moeflow.kernels.linear import linear
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.moe import MoE
from moeflow.models.layers.norm import RMSNorm
from moeflow.models.layers.packed_layers import PackedLayers
from moeflow.models.layers.rotary import RotaryEmbedding
from moeflow.models.layers.weight_allocator import Weight, WeightAllocator, rows_of, whole


class CausalLM:
    """What the model files build. Weights are uninitialised until a loader fills `named_weights`."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, layers: Iterable[DecoderLayer]) -> None:
        self.config = config
        self.dtype = allocator.dtype  # of hidden states
        self.device = allocator.device
        self.embed_tokens = allocator.embedding(config.vocab_size, config.hidden_size)
        self.layers = tuple(layers)
        self.norm = RMSNorm(allocator, config.hidden_size, config.rms_norm_eps)
        self._vocab = allocator.columns("logits", config.vocab_size)
        self.lm_head = self._make_head(allocator)
        self._packed = PackedLayers.of(self.layers, allocator)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, allocator.device)

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Return the hidden states after the final norm; writes K and V of every token to `context.kv`.

        Shapes: token_ids [T] int64 -> [T, H].
        """
        hidden = embedding(token_ids, self.embed_tokens)
        rotary = self.rotary(context.positions, hidden.dtype)
        if self._packed is not None and context.kv.is_for_kernels:
            hidden = self._packed(hidden, rotary, context)
        else:
            for layer in self.layers:
                hidden = layer(hidden, rotary, context)
        return self.norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, H] from a pass -> [S, V] float32.

        Where ranks share the head, all call this with the same rows. Raises: GroupError.
        """
        own = linear(hidden, self.lm_head).float()
        return own if self._vocab is None else self._vocab.gather(own)

    @property
    def shares_head(self) -> bool:
        """Whether logits are computed by all ranks together."""
        return self._vocab is not None

    def _make_head(self, allocator: WeightAllocator) -> Weight:
        """Return the output projection, or of it the rows of the tokens that are this rank's."""
        config, own = self.config, None if self._vocab is None else [self._vocab.own]
        if not config.tie_word_embeddings:
            return allocator.embedding(config.vocab_size, config.hidden_size, own)
        if own is None:
            return self.embed_tokens
        assert isinstance(self.embed_tokens, PackedWeight)  # ranks have nothing else
        return self.embed_tokens.take(own)

    def router_names(self) -> Iterator[str]:
        """Yield the checkpoint names of the matrices that choose experts."""
        for layer_idx, layer in enumerate(self.layers):
            if isinstance(layer.mlp, MoE):
                yield layer.mlp.router_name(f"model.layers.{layer_idx}")

    def named_weights(self) -> Iterator[tuple[str, Destination]]:
        """Yield every (checkpoint name, where its tensor goes)."""
        yield "model.embed_tokens.weight", whole(self.embed_tokens)
        for layer_idx, layer in enumerate(self.layers):
            yield from layer.named_weights(f"model.layers.{layer_idx}")
        yield "model.norm.weight", self.norm.weight
        if not self.config.tie_word_embeddings:
            own = range(self.config.vocab_size) if self._vocab is None else self._vocab.own
            (rows,) = rows_of(self.lm_head, [own])
            yield "lm_head.weight", rows
