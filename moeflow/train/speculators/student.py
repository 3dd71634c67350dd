"""A small trainable Llama, built from the target's embeddings, some of its layers, its norm and head.

Parameters have the names of Hugging Face's Llama. Embeddings and head are not trained. They are most of a small model,
cost the most time, and fit the tokens already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.kernels.rotary import apply_rotary
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.moe import MoE
from moeflow.models.layers.rotary import RotaryEmbeddings
from moeflow.models.loading import not_decoder_only, outline

EMBEDDINGS, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
FROZEN = (EMBEDDINGS, HEAD)
_FFN = ("gate_proj", "up_proj", "down_proj")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Student:
    """A model and its weights by name; norms are float32."""

    shape: ModelConfig
    weights: dict[str, Tensor]

    @property
    def trained(self) -> dict[str, Tensor]:
        """The trained weights."""
        return {name: weight for name, weight in self.weights.items() if name not in FROZEN}

    @property
    def head(self) -> Tensor:
        """Return the output projection [V, H]."""
        return self.weights[EMBEDDINGS if self.shape.embeddings.tie_word_embeddings else HEAD]

    def hidden(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the inputs of the head for independent sequences.

        Shapes: token_ids [N] int64, one sequence after another -> [N, H].
        """
        positions = torch.cat([torch.arange(length) for length in lengths])
        rotary = RotaryEmbeddings([self.shape.attention.rotary], self.shape.attention.head_dim, token_ids.device)
        (table,) = rotary(positions, torch.float32)
        hidden = F.embedding(token_ids, self.weights[EMBEDDINGS]).float()
        for layer in range(self.shape.num_layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{prefix}.input_layernorm.weight")
            hidden = hidden + self._attention(normed, f"{prefix}.self_attn", table.cos, table.sin, lengths)
            hidden = hidden + self._ffn(self._norm(hidden, f"{prefix}.post_attention_layernorm.weight"), layer)
        return self._norm(hidden, NORM)

    def _attention(self, x: Tensor, prefix: str, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        shape = self.shape
        q = self._linear(x, f"{prefix}.q_proj").view(-1, shape.attention.num_heads, shape.attention.head_dim)
        k, v = (
            self._linear(x, f"{prefix}.{name}").view(-1, shape.attention.num_kv_heads, shape.attention.head_dim)
            for name in _PROJECTIONS[1:3]
        )
        q, k = (apply_rotary(each.float(), cos, sin).to(v.dtype) for each in (q, k))
        attended = torch.cat([_attend(*(each[where] for each in (q, k, v))) for where in _spans(lengths)])
        return self._linear(attended, f"{prefix}.o_proj")

    def _ffn(self, x: Tensor, layer: int) -> Tensor:
        prefix = f"model.layers.{layer}.mlp"
        gate, up = (self._linear(x, f"{prefix}.{name}") for name in _FFN[:2])
        return self._linear(F.silu(gate) * up, f"{prefix}.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weights[name], self.shape.norms.eps)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend within one sequence. Shapes: q [T, Q, D], k and v [T, KV, D] -> [T, Q * D]."""
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)


def _spans(lengths: Sequence[int]) -> Iterator[slice]:
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


def student_from(checkpoint: Checkpoint, num_layers: int, dtype: torch.dtype = torch.float32) -> Student:
    """Return an untrained student of the target's first and last layers. Experts become their mean.

    `dtype` is that of its matrices. Raises: CheckpointError; ConfigError if the target has too few layers, or layers
    that a Llama lacks.
    """
    target = outline(checkpoint)
    if not isinstance(target, CausalLM):
        raise not_decoder_only(checkpoint)
    sources = _source_layers(target.config, num_layers)
    weights = {EMBEDDINGS: checkpoint.read(EMBEDDINGS), NORM: checkpoint.read(NORM)}
    if not target.config.embeddings.tie_word_embeddings:
        weights[HEAD] = checkpoint.read(HEAD)
    for layer, source in enumerate(sources):
        mlp = target.layers[source].mlp
        prefix = f"model.layers.{source}"
        ffn = (
            [mlp.expert_names(prefix, expert) for expert in range(target.config.routing.num_experts)]
            if isinstance(mlp, MoE)
            else []
        )
        weights |= dict(_layer(checkpoint, f"model.layers.{layer}", prefix, ffn))
    shape = _shape(target.config, len(sources), weights)
    types = {name: torch.float32 if weight.dim() == 1 else dtype for name, weight in weights.items()}
    return Student(shape, {name: weight.to(types[name]).contiguous() for name, weight in weights.items()})


def _source_layers(target: ModelConfig, num_layers: int) -> list[int]:
    """Return the target's layers to copy, all of one kind and size."""
    if target.recurrent is not None:
        raise ConfigError(
            f"{target.model_type} models have recurrent layers, whose states cannot be rolled back after a rejected "
            "draft: run them without speculators"
        )
    traits = {
        "latent attention": target.attention.latent is not None,
        "partly or pairwise rotated heads": any(
            rope.rotary_dim or rope.is_interleaved for rope in target.attention.ropes
        ),
        "no rotary positions": target.attention.rope is None,
        "layer norms": target.norms.has_layer_norms,
        "no gates": not target.feed_forward.is_gated,
    }
    if found := [trait for trait, has_it in traits.items() if has_it]:
        raise ConfigError(
            f"{target.model_type} models have {', '.join(found)}, unlike the draft model: use a speculator without "
            "training"
        )
    usable = [layer for layer in range(target.num_layers) if layer not in target.feed_forward.dense_layers]
    if not 1 <= num_layers <= len(usable):
        raise ConfigError(f"this model has no {num_layers} layers to copy: use from 1 to {len(usable)} (--layers)")
    num_first = (num_layers + 1) // 2
    return [*usable[:num_first], *usable[len(usable) - num_layers + num_first :]]


def _layer(
    checkpoint: Checkpoint, prefix: str, source: str, experts: Sequence[Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a layer's weights under their new names."""
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", checkpoint.read(f"{source}.{norm}.weight")
    for name in (f"self_attn.{projection}.{kind}" for projection in _PROJECTIONS for kind in ("weight", "bias")):
        if f"{source}.{name}" in checkpoint.tensors:
            yield f"{prefix}.{name}", checkpoint.read(f"{source}.{name}")
    for place, matrix in enumerate(_FFN):
        if experts:
            yield f"{prefix}.mlp.{matrix}.weight", _mean(checkpoint, [names[place] for names in experts])
            continue
        for kind in ("weight", "bias"):
            if f"{source}.mlp.{matrix}.{kind}" in checkpoint.tensors:
                yield f"{prefix}.mlp.{matrix}.{kind}", checkpoint.read(f"{source}.mlp.{matrix}.{kind}")


def _mean(checkpoint: Checkpoint, names: Sequence[str]) -> Tensor:
    total = checkpoint.read(names[0]).float()
    for name in names[1:]:
        total = total + checkpoint.read(name).float()
    return total / len(names)


def _shape(target: ModelConfig, num_layers: int, weights: Mapping[str, Tensor]) -> ModelConfig:
    ffn = weights["model.layers.0.mlp.gate_proj.weight"]
    return ModelConfig.from_fields(
        model_type="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=num_layers,
        num_heads=target.attention.num_heads,
        num_kv_heads=target.attention.num_kv_heads,
        head_dim=target.attention.head_dim,
        intermediate_size=ffn.shape[0],
        max_position=target.max_position,
        eps=target.norms.eps,
        rope=target.attention.rope,
        tie_word_embeddings=target.embeddings.tie_word_embeddings,
        qkv_bias=target.attention.qkv_bias,
        out_bias=target.attention.qkv_bias,
        mlp_bias=target.feed_forward.mlp_bias,
        hidden_act=target.feed_forward.hidden_act,
    )
